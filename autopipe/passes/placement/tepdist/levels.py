"""The optimisation levels O2, O3 and O4 of TePDist: solvers that choose the splits inside a stage,
given its cost tables (`SplitTables`).

A choice is one configuration per variable of the min-sum model of the tables; a strategy is a
configuration. Cheap operators can be contracted into their neighbours; what remains are cones.
Critical nodes are operators that separate the graph into segments.

- O2 contracts operators into cones, solves the segments between critical nodes by integer programs,
  and combines the segments by dynamic programming ("SPMD Strategy" of the TePDist paper).
- O3 solves one integer program over all cones.
- O4 solves one integer program over all operators.

Within a memory limit, each level first searches a cost per byte (a Lagrange multiplier), as the
exact search does (`min_sum.memory_limit`).
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
    cheapest_by_program,
    cheapest_within_memory,
    fix_by_reduced_cost,
)
from autopipe.passes.placement.tepdist.segments import (
    Cones,
    SegmentCache,
    divide_into_segments,
    fill_cones,
    has_passed,
    merge_without_cones,
    path_choice,
    solve_cheapest_path,
    variable_ranks,
)
from autopipe.passes.sharding.search import SplitTables
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Incumbent
from autopipe.passes.solvers.min_sum.memory_limit import HullEdge
from autopipe.passes.solvers.min_sum.model import (
    Array,
    absorb_fixed_nodes,
    add_memory_cost,
    all_configurations,
    memory_as_cost,
    restrict,
    with_recomputed_cost,
)
from autopipe.passes.solvers.pulp_client import AUTO

ROUNDS = 8
"""Maximum number of costs per byte that are tried within a memory limit."""
CLOSE = 1e-3
"""Relative gap between cost and bound at which no further cost per byte is tried."""
SAME = 1e-9
"""Relative difference of costs that is attributed to rounding errors."""
MAXIMUM_COMBINATIONS = 8
"""Maximum number of combinations of strategies (configurations) of the high-degree variables that
are tried.
"""
_PATIENCE_S = 60.0
"""Maximum seconds for one integer program if there is no time limit."""
_MINIMUM_S = 0.1
"""Minimum seconds that one integer program gets, even after the time limit."""


def best_mixture(
    model: MinSum, rank: Array, first: Sequence[int], last: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """Return the cheapest mixture of two choices within `limit` bytes, or None if no mixture fits.

    A choice gives each variable one configuration. `rank` contains, for each variable, the number
    of edges on the longest path that ends at it. A mixture has the configurations of `first` for
    all variables below some rank, and of `last` for all others. At a given cost per byte, equal
    layers have equal configurations, so a choice either exceeds the limit by far or leaves much
    memory unused. Mixtures are between these extremes.

    The costs and bytes of all mixtures are prefix sums of changes: a variable changes at its own
    rank, and an edge at the ranks of both ends. Time O(variables + edges).
    """
    order = np.unique(rank, return_inverse=True)[1]
    mixtures = int(order.max()) + 2
    index, cost, need = (
        np.array(list(_mixture_changes(model, order, first, last)), dtype=float).reshape(-1, 3).T
    )
    forbidden = np.isinf(cost)
    changes = np.zeros((3, mixtures))
    for step, change in zip(
        changes, (np.where(forbidden, 0.0, cost), need, np.sign(cost) * forbidden), strict=True
    ):
        np.add.at(step, index.astype(np.int64), change)
    costs, memory, infinite = changes.cumsum(axis=1)
    costs[(infinite > 0.5) | (memory > limit)] = np.inf
    best = int(costs.argmin())
    return tuple(np.where(order < best, first, last).tolist()) if np.isfinite(costs[best]) else None


def _mixture_changes(
    model: MinSum, order: Array, first: Sequence[int], last: Sequence[int]
) -> Iterator[tuple[int, float, float]]:
    """Yield (rank index, cost, bytes): changes of cost and memory from one mixture to the next.

    Mixture number r has the configurations of `first` for all variables with a rank index below r,
    and of `last` for all others. `order` contains the rank index of each variable: the position of
    its rank among all distinct ranks. A change with rank index r applies from mixture r - 1 to r;
    the changes with rank index 0 add up to the cost and memory of mixture 0. Changes with equal
    rank index add up.
    """

    def changing_entries() -> Iterator[
        tuple[Array, Array | None, tuple[int, ...], tuple[int | tuple[int, int], ...]]
    ]:
        """Yield (costs, memory, rank indices, entries) for each variable and edge.

        costs, memory: the arrays of the variable or edge.
        rank indices: numbers of the mixtures from which on another entry of these arrays counts.
        entries: for each of the rank indices, the entry that counts from this mixture on.
        """
        for variable, (costs, memory) in enumerate(
            zip(model.costs, model.node_memory, strict=True)
        ):
            yield costs, memory, (0, int(order[variable]) + 1), (last[variable], first[variable])
        for edge in model.edges:
            source = edge.source
            target = edge.target
            lower, higher = sorted((source, target), key=lambda variable: int(order[variable]))
            between = (
                (first[source], last[target]) if lower == source else (last[source], first[target])
            )
            entries = (last[source], last[target]), between, (first[source], first[target])
            yield (
                edge.costs,
                edge.memory,
                (0, int(order[lower]) + 1, int(order[higher]) + 1),
                entries,
            )

    for costs, memory, indices, entries in changing_entries():
        previous = 0.0, 0.0
        for index, entry in zip(indices, entries, strict=True):
            current = float(costs[entry]), 0.0 if memory is None else float(memory[entry])
            yield index, *current
            yield index, -previous[0], -previous[1]
            previous = current


class MemoryLimitSearch(Incumbent):
    """The best choice (one configuration per variable) within a memory limit that was found so far.
    No choice within the limit costs less than `bound`.
    """

    rate = 0.0
    """The cost per byte that gave the highest lower bound."""

    @property
    def best_assignment(self) -> Assignment:
        """Return the best choice with its bound. It is proven optimal if its cost and the bound are
        equal except for rounding errors.
        """
        proven = self.cost - self.bound <= SAME * abs(self.cost)
        return Assignment(self.choice, self.cost, self.bound, proven, self.memory)

    def raise_bound(self, bound: float) -> None:
        """Raise the lower bound to `bound`, but not above the cost of the best choice. A lower
        `bound` changes nothing.
        """
        self.bound = min(max(self.bound, bound), float(self.cost))

    def offer_mixtures(self, rank: Array, one: Sequence[int], other: Sequence[int]) -> None:
        """Replace the best choice by the best mixture of the choices `one` and `other`, if that
        costs less.

        A mixture has the configurations of one choice for all variables below some rank, and those
        of the other choice for the remaining variables. Both orders of the choices are tried.
        `rank` contains, for each variable, the number of edges on the longest path that ends at it.
        """
        for first, last in ((one, other), (other, one)):
            if found := best_mixture(self.model, rank, first, last, self.limit):
                self.offer(found)


class Level(ABC):
    """A solver of `SplitTables`: finds a choice (one configuration per variable) of minimum cost.
    It may run for `time_limit` seconds after its construction, and then returns the best choice so
    far.

    `solver` is the integer-program solver (a name of `pulp_client.SOLVER_NAMES`).
    """

    fill: Callable[..., Cones] = staticmethod(fill_cones)

    def __init__(self, time_limit: float | None = None, solver: str = AUTO) -> None:
        self._solver = solver
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._enough = math.inf

    def stopping_below(self, cost: float) -> Self:
        """Return a copy of this solver that ends a search within memory as soon as its bound shows
        that no choice costs less than `cost`.
        """
        other = copy.copy(self)
        other._enough = cost
        return other

    def __call__(self, tables: SplitTables, limit: float | None) -> Assignment:
        """Return the cheapest choice that is found, within `limit` bytes unless it is None.

        Its cost and memory are computed in the model of `tables`. If no choice fits, the result has
        the least memory that was found, and `fits` is False. Raise InfeasibleError if all choices
        are forbidden.
        """
        model = tables.model
        # The tables are empty if the stage consists of copies of nodes that each stage computes
        # locally.
        if not model.costs:
            return Assignment((), 0.0, 0.0, proven=True, memory=0)
        if limit is None:
            return with_recomputed_cost(self.cheapest(model), model)
        # The choice of minimum memory is found faster than the choice of minimum cost. It shows
        # whether any choice can satisfy the memory limit.
        smallest = self.cheapest(memory_as_cost(model))
        fitting = with_recomputed_cost(replace(smallest, proven=False), model)
        infeasible = replace(fitting, bound=fitting.cost, proven=smallest.proven, fits=False)
        if fitting.memory > limit and smallest.proven:
            return infeasible
        free = with_recomputed_cost(self.cheapest(model), model)
        if free.memory <= limit:
            return free
        if fitting.memory > limit:
            return infeasible
        if free.bound >= self._enough:
            return replace(fitting, bound=free.bound)
        return with_recomputed_cost(
            self.within_memory(
                model, self._search_byte_costs(model, HullEdge(limit, free, fitting))
            ),
            model,
        )

    def _search_byte_costs(self, model: MinSum, edge: HullEdge) -> MemoryLimitSearch:
        """Return the best choice within a memory limit that is found by trying costs per byte, and
        mixtures of the resulting choices (`best_mixture`).

        The cost per byte moves towards the value with the highest lower bound. `edge` contains the
        best choices above and within the memory limit. Their mixtures come closer to the limit than
        the choices for a cost per byte. The search stops if the bound shows that no choice within
        the limit is cheap enough (`stopping_below`).
        """
        rank = variable_ranks(model)
        limit = edge.limit
        found = MemoryLimitSearch(model, limit, float(edge.over.bound))
        found.offer(edge.under.choice)
        found.offer_mixtures(rank, edge.over.choice, edge.under.choice)
        for _ in range(ROUNDS):
            done = found.cost - found.bound <= CLOSE * found.cost or found.bound >= self._enough
            if has_passed(self._end) or not edge.is_open or done:
                break
            rate = edge.rate
            answer = self.cheapest_with_byte_cost(model, rate)
            if answer.bound - rate * limit > found.bound:
                found.rate = rate
                found.bound = float(answer.bound) - rate * limit
            point = with_recomputed_cost(answer, model)
            if not edge.is_improved_by(point.cost + rate * point.memory, rate):
                break
            edge.replace_point(point)
            found.offer(point.choice)
            found.offer_mixtures(rank, edge.over.choice, edge.under.choice)
        found.raise_bound(found.bound)
        return found

    @abstractmethod
    def cheapest(self, model: MinSum) -> Assignment:
        """Return the cheapest choice if there is no memory limit."""

    @abstractmethod
    def cheapest_with_byte_cost(self, model: MinSum, rate: float) -> Assignment:
        """Return a choice for which the cost plus `rate` times the bytes is small. The bound of the
        result is a lower bound on this sum for all choices.
        """

    @abstractmethod
    def within_memory(self, model: MinSum, found: MemoryLimitSearch) -> Assignment:
        """Return the best choice within the memory limit. `found` is the result of the search over
        costs per byte.
        """

    @property
    def program_seconds(self) -> float:
        """Return the seconds that one integer program may take."""
        return _PATIENCE_S if self._end is None else max(_MINIMUM_S, self._end - time.monotonic())


def solve_by_segments(
    model: MinSum, rank: Array, seconds: float, end: float | None, close: float, solver: str
) -> Assignment:
    """Return the cheapest choice (one configuration per variable) of a merged model (`merge_edges`)
    whose edges lead from lower to higher `rank`.

    A strategy is a configuration of a variable. `divide_into_segments` selects high-degree
    variables (read in many layers), and divides the remaining graph into segments. The strategies
    of the high-degree variables are fixed to one combination after the other, in ascending order of
    a lower bound on the cost of the whole model. For each combination, `solve_cheapest_path` solves
    the segments. The search stops at time `end` (`time.monotonic`, None for no limit), or if the
    next lower bound is not below the best cost by more than the fraction `close`. `seconds` limits
    each integer program. Raise InfeasibleError if all choices are forbidden.
    """
    segmented = divide_into_segments(model, rank)
    reduced = fix_by_reduced_cost(model, 0 if segmented.high_degree else np.inf)
    if reduced.is_optimal:
        return reduced.optimal_assignment(model)
    combinations, others = _strategy_combinations(reduced, segmented.high_degree)
    segments = SegmentCache()
    best = np.inf
    choice = reduced.choice
    bounds = [others]
    for bound, strategies in combinations:
        if bound >= best * (1 - close) or has_passed(end):
            bounds.append(bound)
            break
        domains = all_configurations(model)
        for variable, number in zip(segmented.high_degree, strategies, strict=True):
            domains[variable] = np.array([number])
        # Each edge of a fixed variable now depends on the other end alone. `absorb_fixed_nodes`
        # therefore adds the costs of the edge to the costs of the other end and removes the edge.
        fixed = absorb_fixed_nodes(restrict(model, domains))
        pairs = segments.segment_tables(fixed, segmented)
        fixed_cost = float(sum(fixed.costs[variable][0] for variable in segmented.high_degree))
        path = solve_cheapest_path(
            fixed, segmented, pairs, seconds, best * (1 - close) - fixed_cost, end, solver
        )
        bounds.append(max(bound, fixed_cost + path.bound))
        if path.solved and fixed_cost + path.cost < best:
            best = fixed_cost + path.cost
            choice = path_choice(path, segmented, pairs, strategies)
    if reduced.cost < best * (1 - SAME):
        choice = reduced.choice
    cost = float(model.cost_of(choice))
    bound = min(cost, max(reduced.bound, min(bounds)))
    return Assignment(
        choice, cost, bound, cost - bound <= SAME * abs(cost), model.memory_of(choice)
    )


def _strategy_combinations(
    reduced: ReducedModel, high_degree: Sequence[int]
) -> tuple[list[tuple[float, tuple[int, ...]]], float]:
    """Return (combinations, bound) for the strategies (configurations) of the variables
    `high_degree`.

    combinations: (lower bound, strategies) pairs, ascending; the lower bound is on the cost of the
    whole model.
    bound: a lower bound on the cost of all combinations that are omitted. While there are more than
    `MAXIMUM_COMBINATIONS`, the strategy with the highest lower bound is dropped.
    """
    reach = {
        variable: dict(
            zip(reduced.kept[variable].tolist(), reduced.reach[variable].tolist(), strict=True)
        )
        for variable in high_degree
    }
    others = np.inf
    while prod(map(len, reach.values())) > MAXIMUM_COMBINATIONS:
        droppable = {
            variable: strategies for variable, strategies in reach.items() if len(strategies) > 1
        }
        bound, variable, strategy = max(
            (bound, variable, strategy)
            for variable in droppable
            for strategy, bound in reach[variable].items()
        )
        del reach[variable][strategy]
        others = min(others, bound)
    combinations = [
        (
            max(
                (
                    reach[variable][strategy]
                    for variable, strategy in zip(high_degree, each, strict=True)
                ),
                default=reduced.bound,
            ),
            each,
        )
        for each in product(*(reach[variable] for variable in high_degree))
    ]
    return sorted(combinations), others


class O2(Level):
    """Level O2: merges cheap operators into their neighbours (cones), solves the segments between
    critical nodes (variables that separate the graph) by integer programs, and combines them by
    dynamic programming. A memory limit is replaced by a cost per byte.
    """

    def cheapest(self, model: MinSum) -> Assignment:
        """Return the cheapest choice. It is proven optimal unless time ran out or too many
        combinations of strategies of high-degree variables were dropped.
        """
        return self.cheapest_with_byte_cost(model, 0.0)

    def cheapest_with_byte_cost(self, model: MinSum, rate: float) -> Assignment:
        """Return the choice with the minimum cost plus `rate` times bytes. The cost of the result
        is this sum.
        """
        cones = fill_cones(model, rate)
        rank = variable_ranks(model)[list(cones.roots)]
        close = CLOSE / 2 if rate else SAME
        found = solve_by_segments(
            add_memory_cost(cones.model, rate),
            rank,
            self.program_seconds,
            self._end,
            close,
            self._solver,
        )
        return replace(found, choice=cones.expand(found.choice))

    def within_memory(self, model: MinSum, found: MemoryLimitSearch) -> Assignment:
        """Return the result of the search over costs per byte, because level O2 has no other search
        within memory.
        """
        return found.best_assignment


class O3(Level):
    """Level O3: one integer program over all cones, the operators that remain after cheap operators
    were merged into their neighbours. A memory limit is a row of the program. The configurations of
    the merged operators are chosen for one cost per byte.
    """

    def cheapest(self, model: MinSum) -> Assignment:
        """Return the cheapest choice. It is proven optimal unless time ran out or configurations
        were dropped to make the program smaller.
        """
        cones = self.fill(model)
        found = cheapest_by_program(cones.model, self.program_seconds, solver=self._solver)
        return replace(found, choice=cones.expand(found.choice))

    def cheapest_with_byte_cost(self, model: MinSum, rate: float) -> Assignment:
        """Return the best choice that is found while the dual of the program is solved. Its bound
        is the dual bound.
        """
        cones = self.fill(model, rate)
        left = fix_by_reduced_cost(add_memory_cost(cones.model, rate))
        return Assignment(cones.expand(left.choice), left.cost, left.bound, proven=False)

    def within_memory(self, model: MinSum, found: MemoryLimitSearch) -> Assignment:
        """Return the best choice of an integer program that contains all configurations with which
        `found` could be improved.

        The program has no variables for operators that were merged into their neighbours. Their
        configurations are chosen for one cost per byte, so the bound of the program is a bound for
        the full model only if no operators were merged.
        """
        cones = self.fill(model, found.rate)
        known = [found.choice[root] for root in cones.roots]
        try:
            cutoff = float(found.cost)
            answer = cheapest_within_memory(
                cones.model,
                found.limit,
                found.rate,
                cutoff,
                known,
                self.program_seconds,
                self._solver,
            )
        except InfeasibleError:
            return found.best_assignment
        found.offer(cones.expand(answer.choice))
        if not cones.filled:
            found.raise_bound(float(answer.bound))
        return found.best_assignment


class O4(O3):
    """Level O4: one integer program over all operators. A memory limit is a row of the program."""

    fill = staticmethod(merge_without_cones)


LevelName = Literal["O2", "O3", "O4"]

LEVELS: Final[Mapping[LevelName, type[Level]]] = {"O2": O2, "O3": O3, "O4": O4}
