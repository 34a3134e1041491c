"""Operators whose numbers one line of numpy tells, as ONNX's own evaluator does: masks, positions, angles.

To load that evaluator is to load every operator there is, which takes longer than to read most models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx


def _unsqueezed(data: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(data, axis=tuple(axes.tolist()))


def _range(start: np.ndarray, end: np.ndarray, step: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.arange(start.item(), end.item(), step.item()).astype(start.dtype)
    return found


def _chosen(condition: np.ndarray, shown: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    return np.where(condition, shown, hidden).astype(shown.dtype, copy=False)


FORMULAS: dict[str, tuple[Callable[..., Any], tuple[str, ...], int]] = {
    "Add": (np.add, ("iuf", "iuf"), 0),
    "Less": (np.less, ("iuf", "iuf"), 0),
    "Mul": (np.multiply, ("iuf", "iuf"), 0),
    "Range": (_range, ("iuf", "iuf", "iuf"), 0),
    "Sub": (np.subtract, ("iuf", "iuf"), 0),
    "Unsqueeze": (_unsqueezed, ("biuf", "i"), 1),
    "Where": (_chosen, ("b", "biuf", "biuf"), 1),
}
"""By operator without attributes: what computes it, the kinds of its operands' types (numpy's own), and from which
operand on types are one."""


def told_by_formula(node: onnx.NodeProto, operands: Sequence[np.ndarray | None]) -> tuple[np.ndarray] | None:
    """The numbers of the result; None where there is no formula for such a node, or none for such numbers."""
    if node.op_type not in FORMULAS or node.domain not in ("", "ai.onnx") or node.attribute:
        return None
    formula, kinds, alike = FORMULAS[node.op_type]
    types = [each.dtype for each in operands if each is not None]
    if len(operands) != len(kinds) or len(types) != len(kinds) or len(set(types[alike:])) > 1:
        return None
    if not all(each.kind in kind for each, kind in zip(types, kinds, strict=True)):
        return None
    try:
        return (np.asarray(formula(*operands)),)
    except (ArithmeticError, ValueError, TypeError, MemoryError):
        return None
