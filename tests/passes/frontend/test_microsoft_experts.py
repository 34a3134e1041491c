"""Mixtures of experts of com.microsoft (MoE, QMoE): numbers against onnxruntime's kernels, on one
device and split over devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from autopipe.backends.onnxruntime import ReferenceModel
from tests.ir.ops.splitting import check, check_pairs
from tests.passes.frontend.decompositions.test_operators import (
    compare,
    computed,
    floats,
    integers_of,
    use_of,
)

TOKENS = 6
HIDDEN = 32
INNER = 32
EXPERTS = 4
Operands = list[tuple[str, np.ndarray] | None]


def operands_of(
    rows: int, biased: bool, gated: bool, shape: tuple[int, ...] = (TOKENS, HIDDEN)
) -> Operands:
    """Return the operands of MoE with `rows` rows in the first layer's weights."""
    bias = (
        (("b1", floats(EXPERTS, rows)), ("b2", floats(EXPERTS, HIDDEN))) if biased else (None, None)
    )
    found: Operands = [("x", floats(*shape)), ("scores", floats(TOKENS, EXPERTS))]
    found += [("w1", floats(EXPERTS, rows, HIDDEN, scale=0.2)), bias[0]]
    found += [("w2", floats(EXPERTS, HIDDEN, INNER, scale=0.2)), bias[1]]
    return [*found, ("w3", floats(EXPERTS, INNER, HIDDEN, scale=0.2))] if gated else found


SWIGLU = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "activation_alpha": 1.702,
    "activation_beta": 1.0,
}


@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu", "clamped"])
def test_activations_and_weights_of_experts(
    activation: str, biased: bool, normalize: int, tmp_path: Path
) -> None:
    limit = {"swiglu_limit": 0.7} if activation == "clamped" else {}
    settings: dict[str, Any] = (
        SWIGLU | limit if activation in ("swiglu", "clamped") else {"activation_type": activation}
    )
    operands = operands_of(INNER * (1 + ("swiglu_fusion" in settings)), biased, False)
    held = "w1 b1 w2 b2"
    compare(
        tmp_path,
        "MoE",
        operands,
        held,
        k=2,
        normalize_routing_weights=normalize,
        rtol=1e-3,
        **settings,
    )


def test_gated_experts_of_a_batch_in_three_dimensions(tmp_path: Path) -> None:
    operands = operands_of(INNER, True, False, (2, TOKENS // 2, HIDDEN))
    compare(tmp_path, "MoE", operands, "w1 w2 b1 b2", k=3, activation_type="gelu", rtol=1e-3)


def test_the_reference_does_not_overwrite_its_operands(tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    experts (float[{TOKENS}, {HIDDEN}] a, float[{TOKENS}, {EXPERTS}] r, float[{EXPERTS}, {INNER}, {HIDDEN}] u,
             float[{EXPERTS}, {HIDDEN}, {INNER}] d) => (float[{TOKENS}, {HIDDEN}] z)
    {{ x = Add(a, a)  y = com.microsoft.MoE <k: int = 2, activation_type: string = "silu"> (x, r, u, , d)  z = Abs(y) }}
    """
    file = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), file)
    feeds = dict(filter(None, operands_of(INNER, False, False)))
    feeds = dict(zip("arud", feeds.values(), strict=True))
    np.testing.assert_allclose(
        computed(file, feeds)[0], ReferenceModel(file, {}).run(feeds)["z"], rtol=1e-3, atol=1e-5
    )


def packed_operands(bits: int, block: int, points: bool, rows: int, biased: bool) -> Operands:
    """Return the operands of QMoE."""

    def layer(name: str, out: int, inner: int) -> tuple[Operands, Any]:
        blocks = inner // block if block else 0
        scales = floats(EXPERTS, out, *([blocks] if block else []), scale=0.002)
        shape = (out, -(-blocks * bits // 8)) if block else (-(-out * bits // 8),)
        made: Operands = [
            (f"w{name}", integers_of(EXPERTS, out, inner * bits // 8)),
            (f"s{name}", scales),
        ]
        bias = (f"b{name}", floats(EXPERTS, out)) if biased else None
        return [*made, bias], (f"z{name}", integers_of(EXPERTS, *shape)) if points else None

    first = layer("1", rows, HIDDEN)
    second = layer("2", HIDDEN, INNER)
    found: Operands = [
        ("x", floats(TOKENS, HIDDEN)),
        ("scores", floats(TOKENS, EXPERTS)),
        *first[0],
        *second[0],
    ]
    return [*found, None, None, None, first[1], second[1]] if points else found


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_experts(bits: int, points: bool, block: int, tmp_path: Path) -> None:
    operands = packed_operands(bits, block, points, 2 * INNER, True)
    settings: dict[str, Any] = SWIGLU | {
        "k": 2,
        "expert_weight_bits": bits,
        "normalize_routing_weights": 1,
    }
    settings |= {"block_size": block} if block else {}
    held = " ".join(each[0] for each in operands[2:] if each)
    # In these cases the kernel quantises activations to bytes.
    atol = 0.3 if block and bits == 8 else 1e-4
    compare(tmp_path, "QMoE", operands, held, rtol=1e-3, atol=atol, **settings)


@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_experts_are_split_over_devices(activation: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = SWIGLU if activation == "swiglu" else {"activation_type": activation}
    operands = operands_of(INNER * (1 + (activation == "swiglu")), True, False)
    use = use_of(tmp_path, "MoE", operands, k=2, **settings)
    assert check(use, 1e-3, 1e-4) == 3
    assert check_pairs(use, 1e-3, 1e-4) == 6


def test_packed_experts_are_split_over_devices(tmp_path: Path) -> None:
    operands = packed_operands(4, 16, True, 2 * INNER, True)
    use = use_of(tmp_path, "QMoE", operands, k=2, block_size=16, expert_weight_bits=4, **SWIGLU)
    assert check(use, 1e-3, 1e-4) == 2
