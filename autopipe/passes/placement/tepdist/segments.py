"""A model cut into segments at its critical nodes; what reaches across many of them is set apart.

A mask or a tied table is read in every layer: no node parts the graph as long as it is there. Such wide variables are
given before segments are searched (`whole.py`), so that nothing that leads past a critical node is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from autopipe.passes.placement.tepdist.critical import RankedVariables, heaviest_path, parting, parts
from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.elimination import Neighbours, neighbours
from autopipe.passes.solvers.min_sum.model import Array

MOST_WIDE = 6
"""Wide variables at most."""
SMALL = 10
"""Variables of a segment for which nothing needs to be wide."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Variables between critical nodes."""

    ends: tuple[int, ...]
    """Places, among the critical nodes, of those that it has edges with: none, one, or two that follow each other."""
    inner: tuple[int, ...]
    """Ascending; none where two critical nodes share an edge."""


@dataclass(frozen=True, slots=True)
class SegmentedModel:
    """A model's variables, each of them wide, critical or inside of a segment."""

    wide: tuple[int, ...]
    critical: tuple[int, ...]
    """From the first to the last."""
    segments: tuple[Segment, ...]


def cut(model: MinSum, rank: Array) -> SegmentedModel:
    """The cut with small segments; of such the one with fewest wide variables.

    Edges lead from lower to higher `rank`.
    """
    around = neighbours(model)
    widest = _widest(around, rank)
    ways = RankedVariables.of(model, around, rank)
    best = min((_cut(ways, around, widest[:count]) for count in range(len(widest) + 1)), key=_largest)
    for variable in best.wide:
        fewer = _cut(ways, around, tuple(other for other in best.wide if other != variable))
        best = min(fewer, best, key=_largest)
    return best


def _widest(around: Neighbours, rank: Array) -> tuple[int, ...]:
    """Values that reach farthest, all their neighbours taken together, one after the other.

    A value that reads one of them far away reaches as far through it alone, and no more once it is wide.
    """
    far = [sum(abs(int(rank[other] - rank[own])) for other in near) for own, near in enumerate(around)]
    found: dict[int, None] = {}
    while len(found) < min(MOST_WIDE, len(around)):
        variable = max(range(len(far)), key=lambda own: (own not in found, far[own]))
        found[variable] = None
        for other in around[variable]:
            far[other] -= abs(int(rank[other] - rank[variable]))
    return tuple(found)


def _largest(found: SegmentedModel) -> int:
    """Variables of the largest segment, or as many as are no trouble."""
    return max(SMALL, *(len(segment.inner) for segment in found.segments), 0)


def _cut(ways: RankedVariables, around: Neighbours, wide: tuple[int, ...]) -> SegmentedModel:
    without = set(wide)
    if len(without) == len(around):
        return SegmentedModel(wide, (), ())
    critical = parting(heaviest_path(ways, without), around, without)
    place = {variable: number for number, variable in enumerate(critical)}
    segments = [
        Segment((number, number + 1), ())
        for number, (one, other) in enumerate(pairwise(critical))
        if other in around[one]
    ]
    for inner in parts(around, without | place.keys()):
        ends = {place[other] for variable in inner for other in around[variable] if other in place}
        segments.append(Segment(tuple(sorted(ends)), inner))
    return SegmentedModel(wide, critical, tuple(segments))
