"""What layers look like in generated code: torch's own functions wherever they compute what ONNX
asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopipe.backends.torch.codegen.call import Call
from autopipe.backends.torch.codegen.stage import EMITTERS
from autopipe.ir.ops import signature_of
from autopipe.ir.placement import Split
from tests.ir.ops.uses import use_of


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def spelled(
    op: str, arrays: list[np.ndarray | None], splits: tuple[Split, ...] = (), **settings: Any
) -> str:
    use = use_of(op, arrays, **settings)
    codes = tuple(
        None if array is None else "abcdefgh"[place] for place, array in enumerate(arrays)
    )
    return EMITTERS[op](Call.of(signature_of(use.graph, use.node), codes, splits))


IMAGE = floats(2, 4, 8, 8)
LABELS = np.zeros((2, 3), np.int64)
SCALES = np.array([1, 1, 2, 2], np.float32)
VECTOR = floats(4)


@pytest.mark.parametrize(
    ("op", "arrays", "settings", "code"),
    [
        ("MatMul", [floats(2, 3), floats(3, 4)], {}, "torch.matmul(a, b)"),
        ("MatMul", [floats(2, 4, 3, 5), floats(5, 6)], {}, "torch.matmul(a, b)"),
        ("MatMul", [floats(2, 4, 3, 5), floats(2, 4, 5, 6)], {}, "torch.matmul(a, b)"),
        ("MatMul", [floats(2, 4, 3, 5), floats(4, 5, 6)], {}, "torch.einsum('abcd,bde->abce', a, b)"),
        ("MatMul", [floats(2, 4, 3, 5), floats(2, 1, 5, 6)], {}, "torch.einsum('abcd,abde->abce', a, b)"),
        ("MatMul", [floats(4, 3, 5), floats(2, 4, 5, 6)], {}, "torch.einsum('bcd,abde->abce', a, b)"),
        ("MatMul", [floats(1, 4, 3, 5), floats(4, 5, 6)], {}, "torch.matmul(a, b)"),
        ("Gemm", [floats(2, 3), floats(5, 3), floats(5)], {"transB": 1}, "F.linear(a, b, c)"),
        ("Gemm", [floats(2, 3), floats(5, 3)], {"transB": 1}, "F.linear(a, b)"),
        ("Gemm", [floats(2, 3), floats(3, 5), floats(5)], {}, "torch.addmm(c, a, b)"),
        ("Gemm", [floats(3, 2), floats(3, 5), floats(2, 1)], {"transA": 1, "beta": 0.5}, "torch.addmm(c, a.t(), b, beta=0.5)"),
        ("Einsum", [floats(2, 3), floats(3)], {"equation": " ij , j -> i "}, "torch.einsum('ij,j->i', a, b)"),
        ("Conv", [IMAGE, floats(6, 4, 3, 3)], {}, "F.conv2d(a, b)"),
        ("Conv", [IMAGE, floats(6, 4, 3, 3), floats(6)], {"pads": [1] * 4, "strides": [2, 2]}, "F.conv2d(a, b, c, stride=2, padding=1)"),
        ("Conv", [IMAGE, floats(4, 1, 3, 1)], {"group": 4, "pads": [1, 0, 2, 0]}, "F.conv2d(F.pad(a, (0, 0, 1, 2)), b, groups=4)"),
        ("ConvTranspose", [IMAGE, floats(4, 2, 2, 2)], {"strides": [2, 2]}, "F.conv_transpose2d(a, b, stride=2)"),
        ("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, "F.max_pool2d(a, 3, 2, 1)"),
        ("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, "F.max_pool2d(a, 3, 2, ceil_mode=True)"),
        ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}, "F.avg_pool2d(a, 2, 2)"),
        ("GlobalAveragePool", [IMAGE], {}, "torch.mean(a, (2, 3), keepdim=True)"),
        ("BatchNormalization", [IMAGE, *[VECTOR] * 4], {}, "operators.batch_norm_by(a, d, e, b, c, 1e-05)"),
        ("LayerNormalization", [floats(2, 3, 4), VECTOR, VECTOR], {}, "F.layer_norm(a, (4,), b, c, 1e-05)"),
        ("RMSNormalization", [floats(2, 3, 4), VECTOR], {"epsilon": 1e-6}, "F.rms_norm(a, (4,), b, 1e-06)"),
        ("InstanceNormalization", [IMAGE, VECTOR, VECTOR], {}, "F.instance_norm(a, weight=b, bias=c, eps=1e-05)"),
        ("GroupNormalization", [IMAGE, VECTOR, VECTOR], {"num_groups": 2}, "F.group_norm(a, 2, b, c, 1e-05)"),
        ("Softmax", [IMAGE], {}, "F.softmax(a, -1)"),
        ("SoftmaxCrossEntropyLoss", [floats(2, 5, 3), LABELS], {"ignore_index": -100}, "F.cross_entropy(a, b)"),
        ("SoftmaxCrossEntropyLoss", [floats(2, 5, 3), LABELS.astype(np.int32)], {"reduction": "sum"}, "F.cross_entropy(a, b.long(), reduction='sum')"),
        ("Attention", [floats(2, 4, 3, 8)] * 3, {"is_causal": 1}, "operators.fused_attention(a, b, c, causal=True)"),
        (
            "Attention",
            [floats(2, 4, 3, 8), floats(2, 2, 3, 8), floats(2, 2, 3, 8), floats(3, 3)],
            {"scale": 0.5},
            "operators.fused_attention(a, b, c, mask=d, scale=0.5)",
        ),
        ("Resize", [IMAGE, None, SCALES], {}, "F.interpolate(a, (16, 16))"),
        ("Resize", [IMAGE, None, SCALES], {"mode": "linear"}, "F.interpolate(a, (16, 16), mode='bilinear')"),
        (
            "LSTM",
            [floats(5, 2, 3), floats(1, 16, 3), floats(1, 16, 4), floats(1, 32)],
            {"hidden_size": 4, "results": 3},
            "operators.lstm(a, b, c, bias=d)[:3]",
        ),
    ],
)  # fmt: skip
def test_spelling(
    op: str, arrays: list[np.ndarray | None], settings: dict[str, Any], code: str
) -> None:
    assert spelled(op, arrays, **settings) == code


def test_attributes_that_count_heads_or_groups_are_shared_out() -> None:
    half = (Split("h", 2),)
    code = spelled("Attention", [floats(2, 3, 16)] * 3, half, q_num_heads=8, kv_num_heads=8)
    assert "(4, 4)" in code
    assert spelled(
        "GroupNormalization", [IMAGE, VECTOR, VECTOR], (Split("g", 2),), num_groups=4
    ) == ("F.group_norm(a, 2, b, c, 1e-05)")
