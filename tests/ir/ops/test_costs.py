"""What rows say of operations and memory against what torch counts: FlopCounterMode, and autograd's saved tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from autopipe.ir.ops import OPERATORS, signature_of
from tests.conformance.adapter import to_tensor
from tests.ir.ops.splitting import Use, computed
from tests.ir.ops.uses import use_of


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


PRODUCTS: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    ("MatMul", [floats(4, 6), floats(6, 8)], {}),
    ("MatMul", [floats(2, 3, 4, 6), floats(3, 6, 8)], {}),
    ("Gemm", [floats(4, 6), floats(8, 6), floats(8)], {"transB": 1}),
    ("Einsum", [floats(2, 4, 6), floats(2, 6, 8)], {"equation": "bij,bjk->bik"}),
    ("Conv", [floats(2, 4, 9, 9), floats(6, 4, 3, 3), floats(6)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("Conv", [floats(2, 4, 9, 9), floats(8, 2, 3, 3)], {"group": 2}),
    ("ConvTranspose", [floats(2, 4, 5, 5), floats(4, 6, 3, 3)], {"strides": [2, 2]}),
    ("Attention", [floats(2, 3, 8, 4), floats(2, 3, 8, 4), floats(2, 3, 8, 4)], {}),
]


@pytest.mark.parametrize(("op", "arrays", "settings"), PRODUCTS)
def test_operations_are_those_that_torch_counts(op: str, arrays: list[np.ndarray], settings: dict[str, Any]) -> None:
    use = use_of(op, arrays, **settings)
    signature = signature_of(use.graph, use.node)
    tensors = {name: to_tensor(array).requires_grad_() for name, array in use.arrays.items()}
    # torch counts attention on CUDA only; the CPU's kernel is given the same formula.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {kernel: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        computed(signature, tensors)
    assert counter.get_total_flops() > 0
    assert OPERATORS[op].flops(signature, use.space) == counter.get_total_flops()


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
    owners = {tensors[name].untyped_storage().data_ptr(): str(i) for i, name in enumerate(use.node.inputs) if name}
    owners |= {result.untyped_storage().data_ptr(): f">{index}" for index, result in enumerate(results)}
    largest = max(result.untyped_storage().nbytes() for result in results)
    return tuple(
        sorted({owners.get(place, "+") for place, size in saved.items() if place in owners or size > largest // 4})
    )


SQUARE = floats(16, 16)
INDICES = np.arange(16, dtype=np.int64)


@pytest.mark.parametrize(
    ("op", "arrays", "settings"),
    [
        *((op, [SQUARE, SQUARE + 1], {}) for op in ("Add", "Sub", "Mul", "Div", "MatMul", "Max")),
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
    ],
)  # fmt: skip
def test_what_backward_keeps_is_what_autograd_saves(
    op: str, arrays: list[np.ndarray], settings: dict[str, Any]
) -> None:
    use = use_of(op, arrays, **settings)
    said = set(OPERATORS[op].keeps)
    if "*" in said:
        said = (said - {"*"}) | {str(index) for index in range(len(arrays))}
    if op == "LayerNormalization":
        said |= {"1"}  # its scale, a parameter that is kept anyway
    assert set(kept(use)) == said
