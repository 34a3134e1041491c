"""ONNX Runtime's own operators against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.helper
import pytest

from autopipe.passes.frontend.inference import Inference
from tests.backends.torch.codegen.reference import compare
from tests.ir.ops.splitting import check

DOMAIN = "com.microsoft"


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


CASES: list[tuple[str, list[np.ndarray | None], tuple[bool, ...], dict[str, Any]]] = [
    ("Gelu", [normal(2, 3, 4)], (True,), {}),
    ("QuickGelu", [normal(2, 3, 4)], (True,), {"alpha": 1.5}),
    ("FastGelu", [normal(2, 3, 4)], (True,), {}),
    ("FastGelu", [normal(2, 3, 4), normal(4)], (True,), {}),
    ("BiasGelu", [normal(2, 3, 4), normal(4)], (True,), {}),
    ("FusedMatMul", [normal(2, 3, 4), normal(2, 5, 4)], (True,), {"transB": 1, "alpha": 0.5}),
    ("FusedMatMul", [normal(2, 4, 3), normal(4, 5)], (True,), {"transA": 1}),
    ("FusedMatMul", [normal(2, 3, 5, 4), normal(3, 6, 5)], (True,), {"transA": 1, "transB": 1}),
    (
        "SkipLayerNormalization",
        [normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4)],
        (True,),
        {},
    ),
    (
        "SkipLayerNormalization",
        [normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4), normal(4)],
        (True, False, False, True),
        {"epsilon": 1e-3},
    ),
    (
        "SkipSimplifiedLayerNormalization",
        [normal(2, 3, 4), normal(2, 3, 4), normal(4)],
        (True, False, False, True),
        {"epsilon": 1e-3},
    ),
    (
        "RotaryEmbedding",
        [normal(2, 3, 8), np.array([[0, 2, 4], [1, 2, 3]]), normal(6, 2), normal(7, 2)[:6]],
        (True,),
        {"num_heads": 2},
    ),
    (
        "RotaryEmbedding",
        [normal(2, 2, 3, 4), np.array([2]), normal(6, 2), normal(7, 2)[:6]],
        (True,),
        {"interleaved": 1},
    ),
]


@pytest.mark.parametrize(("op", "arrays", "outputs", "attributes"), CASES)
def test_results_and_splits(
    op: str, arrays: list[np.ndarray | None], outputs: tuple[bool, ...], attributes: dict[str, Any]
) -> None:
    assert check(compare(op, arrays, opset=17, outputs=outputs, domain=DOMAIN, **attributes)) > 0


@pytest.mark.parametrize(("op", "arrays", "outputs", "attributes"), CASES)
def test_shapes_are_told(
    op: str, arrays: list[np.ndarray | None], outputs: tuple[bool, ...], attributes: dict[str, Any]
) -> None:
    use = compare(op, arrays, opset=17, outputs=outputs, domain=DOMAIN, **attributes)
    names = [f"o{index}" if wanted else "" for index, wanted in enumerate(outputs)]
    proto = onnx.helper.make_node(op, use.node.inputs, names, domain=DOMAIN, **attributes)
    operands = tuple(
        (use.graph.type_of(name), None) if name else (None, None) for name in use.node.inputs
    )
    found = Inference((("", 17), (DOMAIN, 1))).types(proto, operands)
    for name, value in zip(names, found, strict=True):
        if name:
            assert value is not None
            assert (value.dtype, value.shape) == (
                use.graph.type_of(name).dtype,
                use.graph.type_of(name).shape,
            )


def test_normalisation_by_root_mean_square() -> None:
    check(
        compare(
            "SimplifiedLayerNormalization", [normal(2, 3, 4), normal(4)], opset=17, epsilon=1e-3
        )
    )
