"""The whole graph: dynamic programming over segments by the strategies of the critical nodes that they share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.passes.placement.tepdist.pairs import Pairs
from autopipe.passes.placement.tepdist.program import Programs
from autopipe.passes.placement.tepdist.segments import SegmentedModel
from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.model import Array


@dataclass(frozen=True, slots=True)
class Path:
    """A strategy for each critical node."""

    strategies: tuple[int, ...]
    cost: float
    """Of nodes and segments, the wide variables' left out."""
    bound: float
    """No path costs less."""
    settled: bool
    """True if the integer programs on it are solved: else the cost is a bound, too."""


def shortest(
    model: MinSum, cut: SegmentedModel, pairs: Sequence[Pairs], programs: Programs, known: float, end: float | None
) -> Path:
    """The path that costs least, where that is less than `known`; what is found by `end` of the clock otherwise.

    Segments on the best path are settled until all of them are: then no other can cost less.
    """
    own = [model.costs[variable] for variable in cut.critical]
    while True:
        strategies, cost = _least(own, cut, [each.costs for each in pairs])
        ends = [tuple(strategies[place] for place in segment.ends) for segment in cut.segments]
        left = {(id(each), at): each for each, at in zip(pairs, ends, strict=True) if not each.settled[at]}
        if not left or cost >= known or is_over(end):
            _, bound = _least(own, cut, [each.bounds for each in pairs])
            return Path(strategies, cost, bound, not left)
        for (_, at), each in left.items():
            each.approach(at, programs)


def is_over(end: float | None) -> bool:
    """True if the clock has come to `end`."""
    return end is not None and time.monotonic() >= end


def choice_of(path: Path, cut: SegmentedModel, pairs: Sequence[Pairs], wide: Sequence[int]) -> tuple[int, ...]:
    """The choice for all variables that goes with a settled path."""
    chosen = dict(zip(cut.wide, wide, strict=True)) | dict(zip(cut.critical, path.strategies, strict=True))
    for segment, each in zip(cut.segments, pairs, strict=True):
        ends = tuple(path.strategies[place] for place in segment.ends)
        chosen.update(zip(segment.inner, each.inside(ends), strict=True))
    return tuple(chosen[variable] for variable in range(len(chosen)))


def _least(own: Sequence[Array], cut: SegmentedModel, tables: Sequence[Array]) -> tuple[tuple[int, ...], float]:
    """The strategies that cost least by the tables of all segments, and what they cost."""
    alone = [costs.astype(float) for costs in own]
    between: list[Array | None] = [None] * len(own)
    constant = 0.0
    for segment, table in zip(cut.segments, tables, strict=True):
        match segment.ends:
            case ():
                constant += float(table)
            case (one,):
                alone[one] += table
            case (one, _):
                known = between[one]
                between[one] = table if known is None else known + table
    if not own:
        return (), constant
    reached = alone[0]
    came_from: list[Array] = []
    for joint, costs in zip(between, alone[1:], strict=False):
        through = reached[:, None] + (0.0 if joint is None else joint)
        came_from.append(np.broadcast_to(through.argmin(axis=0), costs.shape))
        reached = through.min(axis=0) + costs
    strategies = [int(reached.argmin())]
    for sources in reversed(came_from):
        strategies.append(int(sources[strategies[-1]]))
    return tuple(reversed(strategies)), constant + float(reached.min())
