"""Types of results that ONNX's own inference does not tell: of GroupNormalization, and of ONNX Runtime's operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value

if TYPE_CHECKING:
    import onnx

Operands = tuple[Value | None, ...]
Results = tuple[Value, ...]
Rule = Callable[[Operands, frozenset[str]], Results]
"""From the operands' types and the names of the attributes that are set (not zero) to the results' types.

Raises ValueError where shapes do not fit or operands are missing.
"""


def _like_first(operands: Operands, flags: frozenset[str]) -> Results:
    first = operands[0]
    assert first is not None
    return (first,)


def _skip_normalization(operands: Operands, flags: frozenset[str]) -> Results:
    """The result, mean and 1 / deviation, and the sum that was normalised."""
    first = operands[0]
    assert first is not None
    statistics = Value("", DType.FLOAT32, (*first.shape[:-1], 1))
    return first, statistics, statistics, first


def _fused_matmul(operands: Operands, flags: frozenset[str]) -> Results:
    left, right = (value for value in operands[:2] if value is not None)
    first, second = left.shape[-2:], right.shape[-2:]
    rows, inner = first[::-1] if "transA" in flags else first
    other, columns = second[::-1] if "transB" in flags else second
    if inner != other:
        raise ValueError(f"{inner} and {other}")
    return (Value("", left.dtype, (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), rows, columns)),)


RULES: dict[tuple[str, str], Rule] = {
    ("", "GroupNormalization"): _like_first,
    ("", "SimplifiedLayerNormalization"): _like_first,
    ("com.microsoft", "Gelu"): _like_first,
    ("com.microsoft", "QuickGelu"): _like_first,
    ("com.microsoft", "FastGelu"): _like_first,
    ("com.microsoft", "BiasGelu"): _like_first,
    ("com.microsoft", "RotaryEmbedding"): _like_first,
    ("com.microsoft", "SkipLayerNormalization"): _skip_normalization,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_normalization,
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
}
"""By domain and operator."""


def told_by_rule(node: onnx.NodeProto, operands: Operands, where: str) -> tuple[Value | None, ...] | None:
    """Types of what a node writes, nameless, None where a result is absent; None where there is no rule for it.

    Raises ModelError where the operands' shapes do not fit.
    """
    rule = RULES.get((node.domain, node.op_type))
    if rule is None or not operands or operands[0] is None:
        return None
    try:
        told = rule(operands, frozenset(each.name for each in node.attribute if each.i))
    except ValueError as error:
        shapes = ", ".join(str(value.shape) for value in operands if value is not None)
        raise ModelError(f"the shapes {shapes} do not fit: {error}", where=where) from error
    results = itertools.zip_longest(node.output, told[: len(node.output)])
    return tuple(replace(value, name="") if name and value else None for name, value in results)
