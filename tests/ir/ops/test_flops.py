"""Operations counted by rows against those that torch counts while it runs the emitted code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopipe.ir.ops import OPERATORS, signature_of
from tests.conformance.adapter import to_tensor
from tests.ir.ops.splitting import computed
from tests.ir.ops.uses import use_of


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("op", "arrays", "settings"),
    [
        ("MatMul", [floats(2, 3, 4, 5), floats(5, 6)], {}),
        ("MatMul", [floats(2, 4, 5), floats(2, 5, 6)], {}),
        ("Gemm", [floats(4, 5), floats(6, 5), floats(6)], {"transB": 1}),
        ("Gemm", [floats(5, 4), floats(5, 6), floats(4, 1)], {"transA": 1, "alpha": 0.5}),
        ("Einsum", [floats(2, 3, 4), floats(2, 4, 5)], {"equation": "bij,bjk->bik"}),
        ("Einsum", [floats(2, 3, 4), floats(5, 4)], {"equation": "...j,kj"}),
        ("Conv", [floats(2, 6, 9), floats(4, 3, 3), floats(4)], {"group": 2, "strides": [2]}),
        (
            "Conv",
            [floats(2, 3, 9, 8), floats(4, 3, 3, 2)],
            {"pads": [1, 0, 2, 1], "dilations": [2, 1]},
        ),
        ("Conv", [floats(1, 2, 5, 5, 5), floats(3, 2, 3, 3, 3)], {"auto_pad": "SAME_UPPER"}),
        (
            "ConvTranspose",
            [floats(2, 4, 5, 6), floats(4, 3, 3, 3)],
            {"strides": [2, 2], "output_padding": [1, 1]},
        ),
        ("ConvTranspose", [floats(2, 4, 5), floats(4, 3, 3)], {"group": 2}),
        ("Attention", [floats(2, 4, 5, 8), floats(2, 4, 7, 8), floats(2, 4, 7, 8)], {}),
        (
            "Attention",
            [floats(2, 5, 32), floats(2, 5, 32), floats(2, 5, 32)],
            {"q_num_heads": 4, "kv_num_heads": 4},
        ),
    ],
)
def test_flops_are_those_that_torch_counts(
    op: str, arrays: list[np.ndarray], settings: dict[str, Any]
) -> None:
    use = use_of(op, arrays, **settings)
    signature = signature_of(use.graph, use.node)
    tensors = {name: to_tensor(array) for name, array in use.arrays.items()}
    # The fused kernel of CPUs is one that the counter does not know.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        computed(signature, tensors)
    assert OPERATORS[op].flops(signature, use.space) == counter.get_total_flops() > 0


def test_a_recurrent_layer_costs_two_products_a_step_and_gate() -> None:
    use = use_of(
        "LSTM",
        [floats(7, 2, 5), floats(2, 12, 5), floats(2, 12, 3)],
        hidden_size=3,
        direction="bidirectional",
    )
    found = OPERATORS["LSTM"].flops(signature_of(use.graph, use.node), use.space)
    assert found == 2 * 7 * 2 * 2 * 4 * 3 * (5 + 3)
