"""Two choices mixed: one up to some place of the graph, the other from there on.

Equal layers choose alike at any price of memory, so that their choices need either too much or far too little; what
lies between are mixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.model import Array


def best_mixture(
    model: MinSum, rank: Array, first: Sequence[int], last: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """`first` for the variables up to some rank and `last` for all others, as costs least within `limit` bytes.

    None where no place will do.
    """
    order = np.unique(rank, return_inverse=True)[1]
    costs, memory = _sums(model, order, first, last)
    costs[memory > limit] = np.inf
    at = int(costs.argmin())
    if not np.isfinite(costs[at]):
        return None
    return tuple(np.where(order < at, first, last).tolist())


def _sums(model: MinSum, order: Array, first: Sequence[int], last: Sequence[int]) -> tuple[Array, Array]:
    """Costs and memory where the variables before each place of an order choose as in `first`, of [places + 1]."""
    places = int(order.max()) + 2
    figures = np.array(list(_changes(model, order, first, last)), dtype=float).reshape(-1, 3)
    at = figures[:, 0].astype(np.int64)
    forbidden = np.isinf(figures[:, 1])
    steps = np.zeros((3, places))
    np.add.at(steps[0], at, np.where(forbidden, 0.0, figures[:, 1]))
    np.add.at(steps[1], at, figures[:, 2])
    np.add.at(steps[2], at, np.sign(figures[:, 1]) * forbidden)
    costs, memory, infinite = steps.cumsum(axis=1)
    return np.where(infinite > 0.5, np.inf, costs), memory


def _changes(
    model: MinSum, order: Array, first: Sequence[int], last: Sequence[int]
) -> Iterator[tuple[int, float, float]]:
    """Places from which on, counted in variables that choose as in `first`, cost and memory are so much more."""
    nothing = (None,) * len(model.costs)
    for variable, (costs, memory) in enumerate(zip(model.costs, model.memory or nothing, strict=True)):
        ends = (0, int(order[variable]) + 1)
        yield from _from_each(ends, (last[variable], first[variable]), costs, memory)
    for edge in model.edges:
        one, other = edge.source, edge.target
        near, far = sorted((one, other), key=lambda variable: int(order[variable]))
        between = (first[one], last[other]) if near == one else (last[one], first[other])
        ends3 = (0, int(order[near]) + 1, int(order[far]) + 1)
        numbers = ((last[one], last[other]), between, (first[one], first[other]))
        yield from _from_each(ends3, numbers, edge.costs, edge.memory)


def _from_each(
    places: Sequence[int], numbers: Sequence[int | tuple[int, int]], costs: Array, memory: Array | None
) -> Iterator[tuple[int, float, float]]:
    """The same of one array, which is read at one number from each place to the next."""
    before: tuple[float, float] | None = None
    for place, number in zip(places, numbers, strict=True):
        now = float(costs[number]), 0.0 if memory is None else float(memory[number])
        yield place, now[0], now[1]
        if before is not None:
            yield place, -before[0], -before[1]
        before = now
