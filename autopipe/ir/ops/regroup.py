"""Reshape and its like: the same elements in the same order under other dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from autopipe.ir.ops.lines import spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature


def regroup(signature: Signature) -> NotationLine:
    """`(a b) c -> a b c`: the common refinement of both shapes, each of its factors an axis.

    Where two shapes of equal product have none (4 3 -> 6 2), those dimensions are not indexed.
    """
    source, target = signature.operand(0).shape, signature.result().shape
    rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    left, right = unindexed(source), unindexed(target)
    extents: list[tuple[str, int]] = []
    if signature.operand(0).elements:
        for sources, targets in _segments(source, target):
            factors = _refine([source[i] for i in sources], [target[i] for i in targets])
            axes = [(f"a{len(extents) + index}", factor) for index, factor in enumerate(factors)]
            extents += axes
            for words, shape, dimensions in ((left, source, sources), (right, target, targets)):
                _assign(words, shape, dimensions, iter(axes))
    line = spell([left, *rest], [right])
    return NotationLine(line.text, tuple(extents))


def _segments(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Shortest runs of dimensions, above extent one, whose products agree."""
    lefts = [axis for axis, extent in enumerate(source) if extent > 1]
    rights = [axis for axis, extent in enumerate(target) if extent > 1]
    while lefts and rights:
        taken, given = [lefts.pop(0)], [rights.pop(0)]
        size, other = source[taken[0]], target[given[0]]
        while size != other:
            if size < other:
                taken.append(lefts.pop(0))
                size *= source[taken[-1]]
            else:
                given.append(rights.pop(0))
                other *= target[given[-1]]
        yield taken, given


def _refine(source: Sequence[int], target: Sequence[int]) -> list[int]:
    """Factors of the common refinement, outer to inner; [] where there is none."""
    cuts = sorted({*itertools.accumulate(source, int.__mul__), *itertools.accumulate(target, int.__mul__)})
    factors = []
    for outer, inner in itertools.pairwise([1, *cuts]):
        if inner % outer:
            return []
        factors.append(inner // outer)
    return factors


def _assign(words: list[str], shape: Sequence[int], dimensions: list[int], axes: Iterator[tuple[str, int]]) -> None:
    for dimension in dimensions:
        group: list[tuple[str, int]] = []
        while math.prod(extent for _, extent in group) < shape[dimension]:
            axis = next(axes, None)
            if axis is None:
                return
            group.append(axis)
        joined = " ".join(name for name, _ in group)
        words[dimension] = joined if len(group) == 1 else f"({joined})"


REGROUP = (
    Operator("Reshape", regroup, "view", static=(1,)),
    Operator("Flatten", regroup, "view"),
    Operator("Squeeze", regroup, "view", static=(1,)),
    Operator("Unsqueeze", regroup, "view", static=(1,)),
)
