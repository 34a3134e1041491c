"""Recurrent layers of all kinds against ONNX Runtime, and the fused layers' gradients against the
loop's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.torch.codegen.reference import compare, gradients

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
USUAL = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
UNUSUAL = {
    "RNN": ["Relu"],
    "GRU": ["HardSigmoid", "Softsign"],
    "LSTM": ["HardSigmoid", "ScaledTanh", "LeakyRelu"],
}
STEPS = 4
BATCH = 3
WIDTH = 2
STATE = 5
BOOLEANS = st.booleans()


def operands(
    op: str, directions: int, seed: int, optional: dict[str, bool]
) -> list[np.ndarray | None]:
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    rows = GATES[op] * STATE
    shapes = {
        "bias": (directions, 2 * rows),
        "lengths": (BATCH,),
        "hidden": (directions, BATCH, STATE),
        "cell": (directions, BATCH, STATE),
        "peepholes": (directions, 3 * STATE),
    }
    arrays: list[np.ndarray | None] = [normal(STEPS, BATCH, WIDTH), normal(directions, rows, WIDTH)]
    arrays.append(normal(directions, rows, STATE))
    for name in list(shapes)[: 5 if op == "LSTM" else 3]:
        if not optional.get(name):
            arrays.append(None)
        elif name == "lengths":
            arrays.append(draw.integers(1, STEPS + 1, BATCH).astype(np.int32))
        else:
            arrays.append(normal(*shapes[name]))
    while arrays[-1] is None:
        arrays.pop()
    return arrays


@given(
    st.sampled_from(("RNN", "GRU", "LSTM")),
    st.sampled_from(("forward", "reverse", "bidirectional")),
    st.integers(0, 2**32 - 1),
    st.fixed_dictionaries(
        dict.fromkeys(("bias", "lengths", "hidden", "cell", "peepholes"), BOOLEANS)
    ),
    BOOLEANS,
    BOOLEANS,
    BOOLEANS,
)
@settings(max_examples=80, deadline=None)
def test_layers_are_those_of_onnxruntime(
    op: str,
    direction: str,
    seed: int,
    optional: dict[str, bool],
    clipped: bool,
    unusual: bool,
    flag: bool,
) -> None:
    directions = 2 if direction == "bidirectional" else 1
    attributes: dict[str, Any] = {"hidden_size": STATE, "direction": direction}
    if clipped:
        attributes["clip"] = 0.5
    if unusual:
        attributes["activations"] = UNUSUAL[op] * directions
        if op == "LSTM":
            attributes["activation_alpha"] = [0.3, 1.1, 0.1] * directions
            attributes["activation_beta"] = [0.4, 0.7] * directions
    if op == "GRU":
        attributes["linear_before_reset"] = int(flag)
    arrays = operands(op, directions, seed, optional)
    compare(op, arrays, opset=21, outputs=(True,) * (3 if op == "LSTM" else 2), **attributes)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_fused_layers_have_the_gradients_of_the_loop(op: str, direction: str) -> None:
    directions = 2 if direction == "bidirectional" else 1
    arrays = operands(
        op, directions, 7, {"bias": True, "hidden": True, "cell": True, "lengths": True}
    )
    whole = np.full(BATCH, STEPS, np.int32)
    attributes: dict[str, Any] = {"hidden_size": STATE, "direction": direction}
    if op == "GRU":
        attributes["linear_before_reset"] = 1
    outputs = (True,) * (3 if op == "LSTM" else 2)
    fused = compare(op, [*arrays[:4], None, *arrays[5:]], opset=21, outputs=outputs, **attributes)
    looped = compare(op, [*arrays[:4], whole, *arrays[5:]], opset=21, outputs=outputs, **attributes)
    for left, right in zip(gradients(fused), gradients(looped), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_coupled_gates_forget_what_they_do_not_take() -> None:
    arrays = operands("LSTM", 1, 3, {"bias": True})
    compare(
        "LSTM", arrays, opset=21, outputs=(True, False, True), hidden_size=STATE, input_forget=1
    )


def test_activations_stated_as_they_are_by_default_stay_fused() -> None:
    for op, names in USUAL.items():
        compare(
            op, operands(op, 1, 5, {"bias": True}), opset=14, hidden_size=STATE, activations=names
        )
