"""Splits that are best where gradients are exchanged while backward still runs.

A step then takes max(0, G - B) beyond all else, with G the exchange of gradients and B the last micro-batch's backward,
which hides it. As max(0, G - B) is at least w (G - B) for any w from 0 to 1, a search with that in its place bounds the
step from below; w is moved to where G and B are even (Lagrangian relaxation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopipe.passes.sharding.reshard_tables import Floats
from autopipe.passes.sharding.tables import Tables
from autopipe.passes.solvers.min_sum import Assignment, MinSum

_ROUNDS = 6
"""Weights that are tried at most."""

_CLOSE = 1e-6
"""Share of a step below which a gap is none."""


def solve_overlapped(tables: Tables, solve: Callable[[MinSum], Assignment]) -> Assignment:
    """The best choice found and its bound, its cost a step in which backward hides the exchange of gradients."""
    best: Assignment | None = None
    bound = 0.0
    low, high, weight = 0.0, 1.0, 0.0
    for _ in range(_ROUNDS):
        answer = solve(replace(tables.model, costs=_weighed(tables, weight)))
        beyond = _beyond(tables, answer)
        bound = max(bound, float(answer.bound))
        cost = float(answer.cost) - weight * beyond + max(0.0, beyond)
        if best is None or cost < best.cost:
            best = replace(answer, cost=cost)
        if not answer.fits or best.cost - bound <= _CLOSE * best.cost:
            break
        low, high = (weight, high) if beyond > 0 else (low, weight)
        weight = 1.0 if weight == 0.0 else (low + high) / 2
    assert best is not None
    return replace(best, bound=min(bound, best.cost), proven=best.proven and best.cost - bound <= _CLOSE * best.cost)


def _weighed(tables: Tables, weight: float) -> tuple[Floats, ...]:
    """The model's costs with `weight` times (G - B) in place of G; equal ones are shared."""
    known: dict[tuple[int, int, int], Floats] = {}
    found = []
    for costs, gradients, backward in zip(tables.model.costs, tables.gradients, tables.backwards, strict=True):
        key = id(costs), id(gradients), id(backward)
        if key not in known:
            known[key] = costs - (1 - weight) * gradients - weight * backward
        found.append(known[key])
    return tuple(found)


def _beyond(tables: Tables, answer: Assignment) -> float:
    """G - B of a choice."""
    each = zip(tables.gradients, tables.backwards, answer.choice, strict=True)
    return float(np.sum([gradients[number] - backward[number] for gradients, backward, number in each]))
