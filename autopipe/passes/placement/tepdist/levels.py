"""The levels of TePDist's search for splits inside a stage, solvers of the tables that every search
shares.

O2: cones, segments between critical nodes by integer programs, dynamic programming over segments.
O3: one integer program over all cones. O4: one over all operators. Within a memory limit all begin
with prices for bytes, as the exact search does (`min_sum.memory_limit`).
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Final, Literal, Self

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.integer_programs import (
    ReducedModel,
    fix_by_reduced_cost,
    least_by_program,
    least_within,
)
from autopipe.passes.placement.tepdist.segments import (
    Cones,
    EqualSegments,
    choice_of,
    cut,
    fill_cones,
    is_over,
    ranks,
    shortest,
    unfilled,
)
from autopipe.passes.sharding.search import Tables
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Incumbent
from autopipe.passes.solvers.min_sum.memory_limit import HullEdge
from autopipe.passes.solvers.min_sum.model import (
    Array,
    conditioned,
    counted,
    everything,
    memory_alone,
    priced,
    restricted,
)
from autopipe.passes.solvers.pulp_client import AUTO

ROUNDS = 8  # Prices that are tried at most.
CLOSE = 1e-3  # Share of the cost that is not worth another price.
SAME = 1e-9  # Share of a cost that is rounding: below it another is no better.
MOST_GIVEN = 8  # Combinations of wide variables' strategies.
_PATIENCE_S = 60.0  # For one integer program, where there is no time limit.
_LEAST_S = 0.1  # For one integer program, where time is over.


def best_mixture(
    model: MinSum, rank: Array, first: Sequence[int], last: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """`first` for the variables up to some rank and `last` for all others, as costs least within
    `limit` bytes; None where no place will do. Equal layers choose alike at any price of memory, so
    that their choices need either too much or far too little; what lies between are mixtures. Costs
    and memory of all places are sums of what changes at each: a variable changes at its own place,
    an edge at those of both its ends.
    """
    order = np.unique(rank, return_inverse=True)[1]
    places = int(order.max()) + 2
    at, cost, need = (
        np.array(list(_changes(model, order, first, last)), dtype=float).reshape(-1, 3).T
    )
    forbidden = np.isinf(cost)
    steps = np.zeros((3, places))
    for step, change in zip(
        steps, (np.where(forbidden, 0.0, cost), need, np.sign(cost) * forbidden), strict=True
    ):
        np.add.at(step, at.astype(np.int64), change)
    costs, memory, infinite = steps.cumsum(axis=1)
    costs[(infinite > 0.5) | (memory > limit)] = np.inf
    place = int(costs.argmin())
    return (
        tuple(np.where(order < place, first, last).tolist()) if np.isfinite(costs[place]) else None
    )


def _changes(
    model: MinSum, order: Array, first: Sequence[int], last: Sequence[int]
) -> Iterator[tuple[int, float, float]]:
    """Places from which on, counted in variables that choose as in `first`, cost and memory are so
    much more.
    """

    def reads() -> Iterator[
        tuple[Array, Array | None, tuple[int, ...], tuple[int | tuple[int, int], ...]]
    ]:
        """Every array of the model, and where it is read from each place on."""
        for variable, (costs, memory) in enumerate(
            zip(model.costs, model.node_memory, strict=True)
        ):
            yield costs, memory, (0, int(order[variable]) + 1), (last[variable], first[variable])
        for edge in model.edges:
            one = edge.source
            other = edge.target
            near, far = sorted((one, other), key=lambda variable: int(order[variable]))
            between = (first[one], last[other]) if near == one else (last[one], first[other])
            numbers = (last[one], last[other]), between, (first[one], first[other])
            yield edge.costs, edge.memory, (0, int(order[near]) + 1, int(order[far]) + 1), numbers

    for costs, memory, places, numbers in reads():
        before = 0.0, 0.0
        for place, number in zip(places, numbers, strict=True):
            now = float(costs[number]), 0.0 if memory is None else float(memory[number])
            yield place, *now
            yield place, -before[0], -before[1]
            before = now


class PricedSearch(Incumbent):
    """The best within a memory limit of what prices and mixtures find; nothing within it costs less
    than `bound`.
    """

    rate = 0.0  # The price of the highest bound.

    @property
    def answer(self) -> Assignment:
        proven = self.cost - self.bound <= SAME * abs(self.cost)
        return Assignment(self.choice, self.cost, self.bound, proven, self.memory)

    def raise_bound(self, bound: float) -> None:
        """Nothing that fits costs less than this."""
        self.bound = min(max(self.bound, bound), float(self.cost))

    def mix(self, rank: Array, one: Sequence[int], other: Sequence[int]) -> None:
        """Take the best mixture of two choices, if that is better."""
        for first, last in ((one, other), (other, one)):
            if found := best_mixture(self.model, rank, first, last, self.limit):
                self.offer(found)


class Level(ABC):
    """A search for the best choice of `Tables`, within `time_limit` seconds from its construction.

    Integer programs are solved by `solver` (a name of `pulp_client.SOLVER_NAMES`). When the time is
    over, the answer is the best choice found.
    """

    fill: Callable[..., Cones] = staticmethod(fill_cones)

    def __init__(self, time_limit: float | None = None, solver: str = AUTO) -> None:
        self._solver = solver
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._enough = math.inf

    def below(self, cost: float) -> Self:
        """The same, but within memory an answer that costs as much is good enough: no better one is
        looked for.
        """
        other = copy.copy(self)
        other._enough = cost
        return other

    def __call__(self, tables: Tables, limit: float | None) -> Assignment:
        """The best choice that is found, of those that need at most `limit` bytes where that is
        given. Cost and memory are counted in the tables' own model. Raises InfeasibleError where
        every choice is forbidden.
        """
        model = tables.model
        if not model.costs:  # A stage may compute nothing but what others compute, too.
            return Assignment((), 0.0, 0.0, proven=True, memory=0)
        if limit is None:
            return counted(self.least(model), model)
        # Least memory is found sooner than least cost, and says where that need not be looked for.
        least = self.least(memory_alone(model))
        fitting = counted(replace(least, proven=False), model)
        beyond = replace(fitting, bound=fitting.cost, proven=least.proven, fits=False)
        if fitting.memory > limit and least.proven:
            return beyond
        free = counted(self.least(model), model)
        if free.memory <= limit:
            return free
        if fitting.memory > limit:
            return beyond
        if free.bound >= self._enough:
            return replace(fitting, bound=free.bound)
        return counted(
            self.within(model, self._priced(model, HullEdge(limit, free, fitting))), model
        )

    def _priced(self, model: MinSum, edge: HullEdge) -> PricedSearch:
        """The best that prices and mixtures find; the price moves to where the bound is highest.
        Mixtures of choices on either side of the limit come closer to it than any price does. No
        price is tried once nothing that costs little enough can fit.
        """
        rank = ranks(model)
        limit = edge.limit
        found = PricedSearch(model, limit, float(edge.over.bound))
        found.offer(edge.under.choice)
        found.mix(rank, edge.over.choice, edge.under.choice)
        for _ in range(ROUNDS):
            done = found.cost - found.bound <= CLOSE * found.cost or found.bound >= self._enough
            if is_over(self._end) or not edge.is_open or done:
                break
            rate = edge.rate
            answer = self.at_price(model, rate)
            if answer.bound - rate * limit > found.bound:
                found.rate = rate
                found.bound = float(answer.bound) - rate * limit
            point = counted(answer, model)
            if not edge.is_above(point.cost + rate * point.memory, rate):
                break
            edge.move(point)
            found.offer(point.choice)
            found.mix(rank, edge.over.choice, edge.under.choice)
        found.raise_bound(found.bound)
        return found

    @abstractmethod
    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost, whatever memory it needs."""

    @abstractmethod
    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """A choice that costs little when a byte costs `rate`; its bound is one of all choices'
        cost and price.
        """

    @abstractmethod
    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The best within the limit, prices being searched."""

    @property
    def seconds(self) -> float:
        """Time for one integer program."""
        return _PATIENCE_S if self._end is None else max(_LEAST_S, self._end - time.monotonic())


def by_segments(
    model: MinSum, rank: Array, seconds: float, end: float | None, close: float, solver: str
) -> Assignment:
    """The best choice of a merged model whose edges lead to higher `rank`; at `end` of the clock,
    what is known. Strategies of the wide variables are given one combination after the other, those
    first that promise most by the dual bound of the whole model, until what is left promises no
    better: what may be less by a share of `close` at most is not looked for. Raises InfeasibleError
    where every choice is forbidden.
    """
    parts = cut(model, rank)
    left = fix_by_reduced_cost(model, 0 if parts.wide else np.inf)
    if left.is_met:
        return left.answer(model)
    given, others = _given(left, parts.wide)
    segments = EqualSegments()
    best = np.inf
    choice = left.choice
    bounds = [others]
    for bound, strategies in given:
        if bound >= best * (1 - close) or is_over(end):
            bounds.append(bound)
            break
        kept = everything(model)
        for variable, number in zip(parts.wide, strategies, strict=True):
            kept[variable] = np.array([number])
        fixed = conditioned(restricted(model, kept))  # Its wide variables have no edges.
        pairs = segments.pairs(fixed, parts)
        apart = float(sum(fixed.costs[variable][0] for variable in parts.wide))
        path = shortest(fixed, parts, pairs, seconds, best * (1 - close) - apart, end, solver)
        bounds.append(max(bound, apart + path.bound))
        if path.settled and apart + path.cost < best:
            best = apart + path.cost
            choice = choice_of(path, parts, pairs, strategies)
    if left.cost < best * (1 - SAME):
        choice = left.choice
    cost = float(model.cost_of(choice))
    bound = min(cost, max(left.bound, min(bounds)))
    return Assignment(
        choice, cost, bound, cost - bound <= SAME * abs(cost), model.memory_of(choice)
    )


def _given(
    left: ReducedModel, wide: Sequence[int]
) -> tuple[list[tuple[float, tuple[int, ...]]], float]:
    """Bounds and combinations of what is left, the most promising first; what any other one costs
    at least.
    """
    reach = {v: dict(zip(left.kept[v].tolist(), left.reach[v].tolist(), strict=True)) for v in wide}
    others = np.inf
    while prod(map(len, reach.values())) > MOST_GIVEN:
        open_reach = {variable: numbers for variable, numbers in reach.items() if len(numbers) > 1}
        bound, variable, number = max(
            (bound, v, number) for v in open_reach for number, bound in reach[v].items()
        )
        del reach[variable][number]
        others = min(others, bound)
    found = [
        (
            max(
                (reach[v][number] for v, number in zip(wide, each, strict=True)), default=left.bound
            ),
            each,
        )
        for each in product(*(reach[variable] for variable in wide))
    ]
    return sorted(found), others


class O2(Level):
    """Three levels: cones, segments, the whole graph. Within a memory limit bytes have a price."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time, and for many wide variables."""
        return self.at_price(model, 0.0)

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """The same with a price for bytes."""
        cones = fill_cones(model, rate)
        rank = ranks(model)[list(cones.roots)]
        close = CLOSE / 2 if rate else SAME
        found = by_segments(
            priced(cones.model, rate), rank, self.seconds, self._end, close, self._solver
        )
        return replace(found, choice=cones.expanded(found.choice))

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        return found.answer


class O3(Level):
    """All cones at once. A memory limit is a row of the program, for cones filled at one price of a
    byte.
    """

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time and size."""
        cones = self.fill(model)
        found = least_by_program(cones.model, self.seconds, solver=self._solver)
        return replace(found, choice=cones.expanded(found.choice))

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """Choice that meets the dual of the program, and its bound."""
        cones = self.fill(model, rate)
        left = fix_by_reduced_cost(priced(cones.model, rate))
        return Assignment(cones.expanded(left.choice), left.cost, left.bound, proven=False)

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The program of all that may be better than what prices found. What it proves is for cones
        that are filled so; of the model it proves something where none are.
        """
        cones = self.fill(model, found.rate)
        known = [found.choice[root] for root in cones.roots]
        try:
            cutoff = float(found.cost)
            answer = least_within(
                cones.model, found.limit, found.rate, cutoff, known, self.seconds, self._solver
            )
        except InfeasibleError:
            return found.answer
        found.offer(cones.expanded(answer.choice))
        if not cones.filled:
            found.raise_bound(float(answer.bound))
        return found.answer


class O4(O3):
    """All operators at once. A memory limit is a row of the program."""

    fill = staticmethod(unfilled)


LevelName = Literal["O2", "O3", "O4"]

LEVELS: Final[Mapping[LevelName, type[Level]]] = {"O2": O2, "O3": O3, "O4": O4}
