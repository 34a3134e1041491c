"""What rows say that backward keeps, against what autograd saves while it runs the emitted code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from autopipe.ir.ops import OPERATORS, signature_of
from tests.conformance.adapter import to_tensor
from tests.ir.ops.splitting import Use, computed
from tests.ir.ops.uses import use_of


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def kept(use: Use) -> tuple[str, ...]:
    """Operands and results that autograd saves, and "+" where it saves something else of note."""
    tensors = {name: to_tensor(array) for name, array in use.arrays.items()}
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.is_floating_point())
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = computed(signature_of(use.graph, use.node), tensors)
    owners = {
        tensors[name].untyped_storage().data_ptr(): str(i)
        for i, name in enumerate(use.node.inputs)
        if name
    }
    owners |= {
        result.untyped_storage().data_ptr(): f">{index}" for index, result in enumerate(results)
    }
    largest = max(result.untyped_storage().nbytes() for result in results)
    return tuple(
        sorted(
            {
                owners.get(place, "+")
                for place, size in saved.items()
                if place in owners or size > largest // 4
            }
        )
    )


SQUARE = floats(16, 16)
INDICES = np.arange(16, dtype=np.int64)


@pytest.mark.parametrize(
    ("op", "arrays", "settings"),
    [
        *((op, [SQUARE, SQUARE + 1], {}) for op in ("Add", "Sub", "Mul", "Div", "MatMul", "Max")),
        *(("SwiGLU", [SQUARE, SQUARE + 1], {"alpha": alpha, "opset": 28}) for alpha in (1.0, 1.7)),
        *(
            (op, [SQUARE], {})
            for op in (
                "Relu", "Gelu", "Sigmoid", "Tanh", "Exp", "Erf", "Neg", "Sin", "HardSwish", "LeakyRelu", "Elu",
                "Softplus", "Mish", "Softmax", "Identity", "Transpose", "Flatten", "ReduceSum", "ReduceMean",
                "ReduceMax", "ReduceL2",
            )
        ),
        ("Sqrt", [abs(SQUARE)], {}),
        ("Log", [abs(SQUARE)], {}),
        ("Where", [SQUARE > 0, SQUARE, SQUARE + 1], {}),
        ("Reshape", [SQUARE, np.array([256])], {}),
        ("Concat", [SQUARE, SQUARE], {"axis": 1}),
        ("Gather", [SQUARE, INDICES], {}),
        ("LayerNormalization", [SQUARE, floats(16)], {}),
        ("Conv", [floats(1, 4, 9, 9), floats(6, 4, 3, 3)], {}),
        ("Gemm", [SQUARE, SQUARE + 1], {}),
        ("MaxPool", [floats(1, 4, 8, 8)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ],
)  # fmt: skip
def test_what_backward_keeps_is_what_autograd_saves(
    op: str, arrays: list[np.ndarray], settings: dict[str, Any]
) -> None:
    use = use_of(op, arrays, **settings)
    said = set(OPERATORS[op].keeps)
    if "*" in said:
        said = (said - {"*"}) | {str(index) for index in range(len(arrays))}
    if "places" in said:
        said = (said - {"places"}) | {"+"}
    if op == "LayerNormalization":
        said |= {"1"}  # its scale, a parameter that is kept anyway
    assert set(kept(use)) == said
