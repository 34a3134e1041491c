"""The search of level O2 on a model of cones: wide variables given, segments by integer programs, a path through them.

Strategies of the wide variables are given one combination after the other, those first that promise most by the dual
bound of the whole model, until what is left promises no better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from autopipe.passes.placement.tepdist.equal_segments import EqualSegments
from autopipe.passes.placement.tepdist.narrowing import ReducedModel, fix_by_reduced_cost
from autopipe.passes.placement.tepdist.path import choice_of, is_over, shortest
from autopipe.passes.placement.tepdist.program import Programs
from autopipe.passes.placement.tepdist.segments import cut
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import Array, conditioned, everything, restricted

MOST_GIVEN = 8
"""Combinations of wide variables' strategies."""
SAME = 1e-9
"""Share of a cost below which another is no better."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A strategy for each wide variable."""

    bound: float
    """No choice with them costs less."""
    strategies: tuple[int, ...]


def by_segments(
    model: MinSum, rank: Array, programs: Programs, end: float | None = None, close: float = SAME
) -> Assignment:
    """The best choice of a merged model whose edges lead to higher `rank`; at `end` of the clock, what is known.

    What may be less by a share of `close` at most is not looked for. Raises InfeasibleError where every choice is
    forbidden.
    """
    parts = cut(model, rank)
    left = fix_by_reduced_cost(model, 0 if parts.wide else np.inf)
    if left.is_met:
        return left.answer(model)
    given, others = _given(left, parts.wide)
    segments = EqualSegments()
    best, choice = np.inf, left.choice
    bounds = [others]
    for each in given:
        if each.bound >= best * (1 - close) or is_over(end):
            bounds.append(each.bound)
            break
        fixed = _with(model, parts.wide, each.strategies)
        pairs = segments.pairs(fixed, parts)
        apart = float(sum(fixed.costs[variable][0] for variable in parts.wide))
        path = shortest(fixed, parts, pairs, programs, best * (1 - close) - apart, end)
        bounds.append(max(each.bound, apart + path.bound))
        if path.settled and apart + path.cost < best:
            best, choice = apart + path.cost, choice_of(path, parts, pairs, each.strategies)
    if left.cost < best * (1 - SAME):
        choice = left.choice
    cost = float(model.cost_of(choice))
    bound = min(cost, max(left.bound, min(bounds)))
    return Assignment(choice, cost, bound, cost - bound <= SAME * abs(cost), model.memory_of(choice))


def _with(model: MinSum, wide: Sequence[int], strategies: Sequence[int]) -> MinSum:
    """The model with these strategies for its wide variables, which then have no edges."""
    kept = everything(model)
    for variable, number in zip(wide, strategies, strict=True):
        kept[variable] = np.array([number])
    return conditioned(restricted(model, kept))


def _given(left: ReducedModel, wide: Sequence[int]) -> tuple[list[_Given], float]:
    """Combinations of what is left, the most promising first; what any other one costs at least."""
    reach = {v: dict(zip(left.kept[v].tolist(), left.reach[v].tolist(), strict=True)) for v in wide}
    others = np.inf
    while prod(map(len, reach.values())) > MOST_GIVEN:
        bound, variable, number = max(
            (bound, variable, number)
            for variable, numbers in reach.items()
            if len(numbers) > 1
            for number, bound in numbers.items()
        )
        del reach[variable][number]
        others = min(others, bound)
    found = [
        _Given(max((reach[v][number] for v, number in zip(wide, each, strict=True)), default=left.bound), each)
        for each in product(*(reach[variable] for variable in wide))
    ]
    return sorted(found, key=lambda each: (each.bound, each.strategies)), others
