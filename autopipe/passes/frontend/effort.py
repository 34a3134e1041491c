"""How much computing the constants of a file may take: a few bytes can spell a pooling window of 10⁹ elements.

What would take more is not computed while compiling: it stays a node of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.graph import Value
from autopipe.passes.frontend.elements import MOST_DIMENSIONS

if TYPE_CHECKING:
    import onnx

MOST_OPERATIONS = 1 << 31
"""Operations for all constants of a graph together: ten masks of 8,192 by 8,192, or a few seconds."""

LOOP = 256
"""Operations that one round of a loop in Python counts as."""

_WHOLE_ARRAYS = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    Cast CastLike Ceil Clip Compress Concat ConstantOfShape Cos Cosh CumSum DepthToSpace DequantizeLinear Div Equal Exp
    Expand EyeLike Flatten Floor Gather Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log LogSoftmax Max
    Mean Min Mod Mul Neg NonZero Not OneHot Or Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round Shape Sigmoid
    Sign Sin Sinh Size Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu Unique
    Unsqueeze Where Xor
"""
_LINEAR = frozenset(_WHOLE_ARRAYS.split())
"""Operators that numpy computes with a few operations for each element that they read or write."""
_LOOPED = frozenset({"Erf", "GatherElements", "GatherND", "Gelu", "ReverseSequence", "ScatterElements", "ScatterND"})
"""Operators that ONNX's evaluator computes in a loop over elements."""
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Range", "Tile"})
"""Operators of which a few numbers tell how much they write."""


@dataclass(slots=True)
class Budget:
    """What is left of the operations or bytes that computing the constants of a graph may take."""

    left: int

    def takes(self, amount: int) -> bool:
        """Take `amount` from what is left, if there is as much."""
        if amount > self.left:
            return False
        self.left -= amount
        return True


def operations_of(node: onnx.NodeProto, operands: Sequence[np.ndarray | None], results: Sequence[Value | None]) -> int:
    """At most what it takes to compute a node: near for operators that tell shapes or make masks, far for others."""
    read = sum(array.size for array in operands if array is not None)
    written = 0
    for name, value in zip(node.output, results, strict=False):
        if value is not None:
            written += value.elements
        elif name:
            written += read if node.op_type not in _GROWING else _grown(node.op_type, operands)
    first, second = (*operands, None, None)[:2]
    if node.op_type in _LINEAR:
        return read + written
    if node.op_type in _LOOPED:
        return (read + written) * LOOP
    if node.op_type in ("MatMul", "Gemm") and first is not None:
        return read + written * max(first.shape, default=1)
    if node.op_type == "Einsum":
        return written + math.prod(array.size for array in operands if array is not None)
    if node.op_type == "Pad" and second is not None and (second >= 0).all():
        return read + written
    # No more than each number of the attributes (windows, paddings) times what is read times what is written.
    sizes: list[int] = [abs(number) for each in node.attribute for number in (*each.ints, each.i)]
    return (1 + read) * (1 + written) * math.prod(1 + size for size in sizes) * LOOP


def _grown(operator: str, operands: Sequence[np.ndarray | None]) -> int:
    """At most the elements of what an operator writes, by the numbers that it reads."""
    arrays = [array for array in operands if array is not None and array.dtype.kind in "iuf"]
    numbers: list[float] = [
        number for array in arrays if array.size <= MOST_DIMENSIONS for number in array.reshape(-1).tolist()
    ]
    if not all(map(math.isfinite, numbers)):
        return MOST_OPERATIONS
    if operator == "Range" and len(numbers) == 3:
        start, end, step = numbers
        return min(math.ceil(abs((end - start) / step)), MOST_OPERATIONS) if step else 0
    return math.prod(array.size for array in arrays) * math.prod(1 + math.ceil(abs(number)) for number in numbers)
