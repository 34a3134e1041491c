"""The levels of the search for splits inside a stage, by name.

Within a memory limit: a price for each byte, moved to where the bound is highest (Lagrangian relaxation).

The best choice at any price bounds what fits. Of choices on either side of the limit the next price is the slope
between them; mixtures of them come closer to the limit than any price does.

The search of level O2 on a model of cones: wide variables given, segments by integer programs, a path through them.

Strategies of the wide variables are given one combination after the other, those first that promise most by the dual
bound of the whole model, until what is left promises no better.

Interface of TePDist's levels of the search for splits: a solver of the tables that every search shares.

Two choices mixed: one up to some place of the graph, the other from there on.

Equal layers choose alike at any price of memory, so that their choices need either too much or far too little; what
lies between are mixtures.

Level O3: one integer program over all cones.

Level O4: one integer program over all operators.

Level O2: cones, segments between critical nodes by integer programs, dynamic programming over segments.
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Final, Literal, Self

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.integer_programs import (
    Programs,
    ReducedModel,
    fix_by_reduced_cost,
    least_by_program,
    least_within,
)
from autopipe.passes.placement.tepdist.segments import (
    EqualSegments,
    choice_of,
    cut,
    fill_cones,
    is_over,
    ranks,
    shortest,
)
from autopipe.passes.sharding.tables import Tables
from autopipe.passes.solvers import milp
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import (
    Array,
    conditioned,
    counted,
    everything,
    memory_alone,
    merged,
    priced,
    restricted,
)


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


AtPrice = Callable[[float], Assignment]
"""For a price a byte the best choice; its bound is that of cost and price together."""

ROUNDS = 8
"""Prices that are tried at most."""
CLOSE = 1e-3
"""Share of the cost that is not worth another price."""
_SAME = 1e-9
"""Share of a cost that is rounding."""


@dataclass(slots=True, eq=False)
class PricedSearch:
    """State of the search for a price."""

    model: MinSum
    rank: Array
    limit: float
    choice: tuple[int, ...]
    """The best that fits."""
    cost: float
    """Of that choice."""
    rate: float = 0.0
    """The price of the highest bound."""
    bound: float = 0.0
    """No choice within the limit costs less."""

    @property
    def answer(self) -> Assignment:
        """The best answer by now."""
        proven = self.cost - self.bound <= _SAME * abs(self.cost)
        return Assignment(self.choice, self.cost, self.bound, proven, self.model.memory_of(self.choice))

    def raise_bound(self, bound: float) -> None:
        """Nothing that fits costs less than this."""
        self.bound = min(max(self.bound, bound), self.cost)

    def offer(self, choice: Sequence[int]) -> None:
        """Take a choice that fits and costs less."""
        cost = float(self.model.cost_of(choice))
        if cost < self.cost and self.model.memory_of(choice) <= self.limit:
            self.choice, self.cost = tuple(choice), cost

    def mix(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Take the best mixture of two choices, if that is better."""
        for first, last in ((one, other), (other, one)):
            if found := best_mixture(self.model, self.rank, first, last, self.limit):
                self.offer(found)


def search_price(
    model: MinSum,
    rank: Array,
    limit: float,
    free: Assignment,
    least: Sequence[int],
    at_price: AtPrice,
    end: float | None,
    enough: float = math.inf,
) -> PricedSearch:
    """The best within `limit` bytes of what prices and mixtures find; `free` needs more, `least` does not.

    Variables come one after the other by `rank`; no price is tried after `end` of the clock, nor once it is known that
    nothing costs less than `enough`.
    """
    found = PricedSearch(model, rank, limit, tuple(least), float(model.cost_of(least)), bound=float(free.bound))
    over, under = free.choice, tuple(least)
    found.mix(over, under)
    for _ in range(ROUNDS):
        more = model.memory_of(over) - model.memory_of(under)
        saved = model.cost_of(under) - model.cost_of(over)
        done = found.cost - found.bound <= CLOSE * found.cost or found.bound >= enough
        if is_over(end) or saved <= 0 or more <= 0 or done:
            break
        rate = float(saved) / float(more)
        line = float(model.cost_of(over)) + rate * float(model.memory_of(over))
        answer = at_price(rate)
        if answer.bound - rate * limit > found.bound:
            found.rate, found.bound = rate, float(answer.bound) - rate * limit
        memory = model.memory_of(answer.choice)
        if float(model.cost_of(answer.choice)) + rate * float(memory) >= line * (1 - _SAME):
            break
        over, under = (over, answer.choice) if memory <= limit else (answer.choice, under)
        found.offer(answer.choice)
        found.mix(over, under)
    found.raise_bound(found.bound)
    return found


_PATIENCE_S = 60.0
"""For one integer program, where there is no time limit."""
_LEAST_S = 0.1
"""For one integer program, where time is over."""


class Level(ABC):
    """Answers tables, its integer programs solved by `solver`.

    Of `time_limit` seconds, counted from now on, an answer within memory may take what is left; when they are over, it
    is the best that is known.
    """

    def __init__(self, time_limit: float | None = None, solver: milp.SolverName = "auto") -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._solver = solver
        self._enough = math.inf

    def below(self, cost: float) -> Self:
        """The same, but within memory an answer that costs as much is good enough: no better one is looked for."""
        other = copy.copy(self)
        other._enough = cost
        return other

    def __call__(self, tables: Tables, limit: float | None) -> Assignment:
        """The best choice that is found, of those that need at most `limit` bytes where that is given.

        Cost and memory are counted in the tables' own model. Raises InfeasibleError where every choice is forbidden.
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
        at_price = partial(self.at_price, model)
        found = search_price(model, ranks(model), limit, free, fitting.choice, at_price, self._end, self._enough)
        return counted(self.within(model, found), model)

    @abstractmethod
    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost, whatever memory it needs."""

    @abstractmethod
    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """A choice that costs little when a byte costs `rate`; its bound is one of all choices' cost and price."""

    @abstractmethod
    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The best within the limit, prices being searched."""

    @property
    def end(self) -> float | None:
        """Of the clock."""
        return self._end

    @property
    def programs(self) -> Programs:
        """How integer programs are solved in the time that is left."""
        left = _PATIENCE_S if self._end is None else max(_LEAST_S, self._end - time.monotonic())
        return Programs(self._solver, left)


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


class O2(Level):
    """Three levels: cones, segments, the whole graph. Within a memory limit bytes have a price."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time, and for many wide variables."""
        return self.at_price(model, 0.0)

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """The same with a price for bytes."""
        cones = fill_cones(model, rate)
        rank, close = ranks(model)[list(cones.roots)], CLOSE / 2 if rate else SAME
        found = by_segments(priced(cones.model, rate), rank, self.programs, self.end, close)
        return replace(found, choice=cones.expanded(found.choice))

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """Result of the search for a price."""
        return found.answer


class O3(Level):
    """All cones at once. A memory limit is a row of the program, for cones filled at one price of a byte."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time and size."""
        cones = fill_cones(model)
        found = least_by_program(cones.model, self.programs)
        return replace(found, choice=cones.expanded(found.choice))

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """Choice that meets the dual of the program, and its bound."""
        cones = fill_cones(model, rate)
        left = fix_by_reduced_cost(priced(cones.model, rate))
        return Assignment(cones.expanded(left.choice), left.cost, left.bound, proven=False)

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The program of all that may be better than what prices found.

        What it proves is for cones that are filled so; the bound is that of prices.
        """
        cones = fill_cones(model, found.rate)
        known = [found.choice[root] for root in cones.roots]
        try:
            answer = least_within(cones.model, found.limit, found.rate, found.cost, known, self.programs)
        except InfeasibleError:
            return found.answer
        found.offer(cones.expanded(answer.choice))
        return found.answer


class O4(Level):
    """All operators at once. A memory limit is a row of the program."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time and size."""
        return least_by_program(merged(model), self.programs)

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """Choice that meets the dual of the program, and its bound."""
        left = fix_by_reduced_cost(merged(priced(model, rate)))
        return Assignment(left.choice, left.cost, left.bound, proven=False)

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The program of all that may be better than what prices found."""
        try:
            answer = least_within(merged(model), found.limit, found.rate, found.cost, found.choice, self.programs)
        except InfeasibleError:
            return found.answer
        found.offer(answer.choice)
        found.raise_bound(float(answer.bound))
        return found.answer


LevelName = Literal["O2", "O3", "O4"]

_SOLVERS: Final[Mapping[LevelName, Callable[[float | None], Level]]] = {"O2": O2, "O3": O3, "O4": O4}


def solver_of(level: LevelName, time_limit: float | None) -> Level:
    """The solver of a level, whose searches together take at most `time_limit` seconds from now on."""
    return _SOLVERS[level](time_limit)
