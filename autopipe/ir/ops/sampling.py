"""Images sampled at the points of a grid."""

from __future__ import annotations

from autopipe.ir.ops.lines import names, spell
from autopipe.ir.ops.row import NotationLine, Operator, Signature, per_result


def _grid_sample(signature: Signature) -> NotationLine:
    rank = len(signature.operand(0).shape)
    points = names(rank - 2, "p")
    return spell([["b", "c", *["1"] * (rank - 2)], ["b", *points, "1"]], [["b", "c", *points]])


def _affine_grid(signature: Signature) -> NotationLine:
    rank = len(signature.result().shape)
    return spell([["b", "1", "1"], ["1"]], [["b", *["1"] * (rank - 1)]])


SAMPLING = (
    Operator("GridSample", _grid_sample, "memory", per_result(12.0), keeps=("0", "1")),
    Operator("AffineGrid", _affine_grid, "memory", per_result(6.0), static=(1,)),
)
