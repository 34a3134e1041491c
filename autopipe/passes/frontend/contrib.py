"""Types of what ONNX Runtime's own operators (domain com.microsoft) write; onnx knows nothing of them.

Source: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, Value

DOMAIN = "com.microsoft"
ALIKE = frozenset(
    {"Gelu", "QuickGelu", "FastGelu", "BiasGelu", "RotaryEmbedding", "SkipLayerNormalization",
     "SkipSimplifiedLayerNormalization"}
)  # fmt: skip
"""Operators whose first result is like their first operand; so is the fourth of those that have it."""


def contrib_types(
    operator: str, stated: dict[str, Attribute], operands: tuple[Value | None, ...], results: int
) -> tuple[Value | None, ...]:
    """Types of an operator's results, None where they are not known. Raises ModelError where shapes do not fit."""
    first = operands[0] if operands else None
    if first is None:
        return (None,) * results
    if operator in ALIKE:
        return tuple(first if index in (0, 3) else None for index in range(results))
    if operator == "FusedMatMul" and len(operands) == 2 and operands[1] is not None:
        return (_product(first, operands[1], stated),)
    return (None,) * results


def _product(left: Value, right: Value, stated: dict[str, Attribute]) -> Value | None:
    if stated.get("transBatchA") or stated.get("transBatchB") or min(len(left.shape), len(right.shape)) < 2:
        return None
    first = left.shape[:-2] + (left.shape[:-3:-1] if stated.get("transA") else left.shape[-2:])
    second = right.shape[:-2] + (right.shape[:-3:-1] if stated.get("transB") else right.shape[-2:])
    try:
        lead = np.broadcast_shapes(first[:-2], second[:-2])
    except ValueError:
        lead = None
    if lead is None or first[-1] != second[-2]:
        raise ModelError(f"the shapes {left.shape}, {right.shape} do not fit: FusedMatMul")
    return Value("", left.dtype, (*lead, first[-2], second[-1]))
