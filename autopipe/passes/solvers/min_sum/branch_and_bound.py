"""The default solver: dual bound, pruning, elimination of what is left, and branching.

Sweeps of the dual raise what each configuration surely costs; those above the best choice known are
dropped. Eliminating the configurations up to a threshold gives a choice, and a proof where it costs
no more than the threshold: whatever was left out costs more. A part that resists is cut in two, and
the part with the least bound is next.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.elimination import (
    MAX_BYTES,
    eliminate_in,
    neighbours,
    reduced,
    size,
    smallest_table,
    with_choice,
)
from autopipe.passes.solvers.min_sum.model import (
    CALLS,
    ENTRIES,
    Array,
    Assignment,
    Budget,
    Kept,
    MinSum,
    Number,
    Support,
    blocks,
    bound_of,
    chosen,
    conditioned,
    everything,
    no_choice,
    restricted,
)

ROUNDING = 1e-11
"""Of all that is added up; each sum of two loses at most 1e-16."""


class Dual:
    """A lower bound by reparametrisation: sequential message passing (TRW-S: Kolmogorov 2006; SRMP:
    Kolmogorov 2015).

    What an edge costs can be moved to its ends without changing any sum. A sweep visits nodes in
    order: each collects from the edges behind it all that they surely cost, sets its own least
    aside as part of the bound, and hands the rest on in equal shares to the edges ahead of it. On a
    chain one sweep forth and one back give the least cost of any choice with a configuration
    exactly.

    Every configuration and edge left must be part of some choice without forbidden pairs of
    neighbours (`Support`).
    """

    bound: float
    """No choice costs less, but for rounding."""
    reach: list[Array]
    """Of every node: no choice with this configuration costs less, but for rounding."""
    rounding: float
    """Rounding error of `bound` and `reach` at most."""

    def __init__(self, model: MinSum) -> None:
        """Takes a merged model."""
        floats: dict[int, Array] = {}
        self._costs = [costs.astype(np.float64) for costs in model.costs]
        self._matrices = [
            floats.setdefault(id(edge.costs), np.asarray(edge.costs, np.float64))
            for edge in model.edges
        ]
        self._ends = [(edge.source, edge.target) for edge in model.edges]
        self._out: list[list[int]] = [[] for _ in model.costs]
        self._into: list[list[int]] = [[] for _ in model.costs]
        for index, edge in enumerate(model.edges):
            self._out[edge.source].append(index)
            self._into[edge.target].append(index)
        least: dict[int, Array] = {}
        for matrix in self._matrices:
            if id(matrix) not in least:
                least[id(matrix)] = matrix.min(axis=1)
        to_source = [least[id(matrix)].copy() for matrix in self._matrices]
        self._messages = to_source, [np.zeros(matrix.shape[1]) for matrix in self._matrices]
        """For every edge the costs moved from it to its source, and those moved to its target."""
        parts = [costs.min() for costs in self._costs] + [costs.min() for costs in to_source]
        self.rounding = ROUNDING * float(np.abs(parts).sum())
        self.bound = 0.0
        rests = [self._set_aside(node) for node in range(len(self._costs))]
        self.reach = [rest + self.bound for rest in rests]

    @property
    def work(self) -> int:
        """Sums that a sweep compares, or could compare in its time."""
        return self.cells([len(costs) for costs in self._costs]) + CALLS * (
            len(self._ends) + len(self._costs)
        )

    def cells(self, sizes: Sequence[int]) -> int:
        """Sums that a sweep compares when the nodes have these numbers of configurations."""
        return sum(sizes[source] * sizes[target] for source, target in self._ends)

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """Visit all nodes in order or backwards; the choice that every node made seeing the choices
        behind it.
        """
        chosen = [0] * len(self._costs)
        for node, behind, ahead in self._visits(forward):
            seen = self._costs[node] + sum(self._messages[not forward][edge] for edge in ahead)
            for edge in behind:
                source, target = self._ends[edge]
                matrix = self._matrices[edge]
                seen = seen + (matrix[chosen[source]] if forward else matrix[:, chosen[target]])
            chosen[node] = int(seen.argmin())
            self._visit(node, behind, ahead, forward)
        return tuple(chosen)

    def tighten(self) -> None:
        """Sweep forth and back for the bounds alone."""
        for forward in (True, False):
            for node, behind, ahead in self._visits(forward):
                self._visit(node, behind, ahead, forward)

    def pairs(self) -> list[Array]:
        """For every edge a matrix: no choice with these two configurations costs less. Takes a
        sweep backwards.
        """
        reach = list(self._matrices)
        for node, behind, ahead in self._visits(forward=False):
            rest = self._visit(node, behind, ahead, forward=False)
            for edge in behind:
                moved = self._matrices[edge] - self._messages[1][edge]
                reach[edge] = moved + (self.bound + rest - self._messages[0][edge])[:, None]
        return reach

    def _visits(self, forward: bool) -> Iterator[tuple[int, list[int], list[int]]]:
        """Nodes, and their edges behind and ahead."""
        if forward:
            yield from zip(range(len(self._costs)), self._into, self._out, strict=True)
        else:
            yield from zip(
                reversed(range(len(self._costs))), self._out[::-1], self._into[::-1], strict=True
            )

    def _visit(self, node: int, behind: list[int], ahead: list[int], forward: bool) -> Array:
        """Collect, set aside and hand on; what each configuration had above the least."""
        into = self._messages[forward]
        back = self._messages[not forward]
        for edge in behind:
            into[edge] = least_difference(self._matrices[edge], back[edge], 0 if forward else 1)
        rest = self._set_aside(node)
        np.maximum(self.reach[node], rest + self.bound, out=self.reach[node])
        for edge in ahead:
            back[edge] -= rest / max(len(ahead), len(behind))
        return rest

    def copy(self) -> Dual:
        other = copy.copy(self)
        other._matrices = list(self._matrices)
        other._costs, other.reach, *messages = (
            [vector.copy() for vector in vectors]
            for vectors in (self._costs, self.reach, *self._messages)
        )
        other._messages = messages[0], messages[1]
        return other

    def restrict(self, kept: Sequence[Array]) -> None:
        """Keep these configurations of every node, ascending indices."""
        changed = [len(keep) < len(costs) for keep, costs in zip(kept, self._costs, strict=True)]
        for node, keep in enumerate(kept):
            if changed[node]:
                self._costs[node] = self._costs[node][keep]
                self.reach[node] = self.reach[node][keep]
        for edge, ends in enumerate(self._ends):
            if changed[ends[0]] or changed[ends[1]]:
                self._matrices[edge] = (
                    self._matrices[edge].take(kept[ends[0]], 0).take(kept[ends[1]], 1)
                )
                for messages, end in zip(self._messages, ends, strict=True):
                    messages[edge] = messages[edge][kept[end]]

    def _set_aside(self, node: int) -> Array:
        """Move the least of all that is at the node to the bound; what remains of it, with its
        messages.
        """
        total = self._costs[node].copy()
        for edge in self._out[node]:
            total += self._messages[0][edge]
        for edge in self._into[node]:
            total += self._messages[1][edge]
        least = np.minimum.reduce(total)
        total -= least
        self._costs[node] -= least
        self.bound += float(least)
        return total


def least_difference(matrix: Array, vector: Array, axis: int) -> Array:
    """The least along `axis` of the matrix less the vector, which lies along it."""
    if matrix.size <= ENTRIES:
        difference = matrix - (vector if axis == 1 else vector[:, None])
        small: Array = np.minimum.reduce(difference, axis=axis)
        return small
    if axis == 1:
        least = np.empty(matrix.shape[0])
        for rows in blocks(matrix.shape[0], matrix.shape[1]):
            (matrix[rows] - vector).min(axis=1, out=least[rows])
        return least
    least = np.full(matrix.shape[1], np.inf)
    for rows in blocks(matrix.shape[0], matrix.shape[1]):
        np.minimum(least, (matrix[rows] - vector[rows, None]).min(axis=0), out=least)
    return least


class Subproblem:
    """Configurations of a merged model, and a dual that knows no others."""

    kept: Kept

    def __init__(self, model: MinSum, kept: Kept) -> None:
        """Begins with what is kept. Raises InfeasibleError where every choice is forbidden, as far
        as pairs show it.
        """
        self._support = Support(model)
        self.kept = self._support.of(kept)
        self.around = neighbours(model)
        self.dual = Dual(restricted(model, self.kept))

    @property
    def bound(self) -> float:
        """No choice in the part costs less."""
        return (
            max(self.dual.bound, *(float(reach.min()) for reach in self.dual.reach))
            - self.dual.rounding
        )

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """One sweep of the dual; the choice it came upon."""
        return chosen(self.kept, self.dual.sweep(forward))

    def within(self, threshold: float) -> list[Array]:
        """Positions of the configurations that may be in a choice which costs no more than this."""
        return [
            np.flatnonzero(reach <= threshold + self.dual.rounding) for reach in self.dual.reach
        ]

    def at(self, positions: Kept) -> list[Array]:
        return [keep[places] for keep, places in zip(self.kept, positions, strict=True)]

    def narrow(self, threshold: float) -> None:
        """Drop configurations that are in no choice which costs as little, once that halves the
        work of a sweep. Raises InfeasibleError where there is no such choice, as far as bounds and
        neighbours show it.
        """
        positions = self.within(threshold)
        sizes = [len(places) for places in positions]
        if not all(sizes):
            raise InfeasibleError("no choice costs as little")
        if 2 * self.dual.cells(sizes) < self.dual.cells([len(keep) for keep in self.kept]):
            self._keep(positions)

    def _keep(self, positions: Kept) -> None:
        """Drop all others, and those that have no neighbour left. Raises InfeasibleError where a
        node has none left.
        """
        kept = self._support.of(self.at(positions))
        self.dual.restrict(
            [np.searchsorted(old, new) for old, new in zip(self.kept, kept, strict=True)]
        )
        self.kept = kept

    def cut(self, positions: Kept) -> Subproblem:
        """Another part, of the configurations at these positions; raises as `narrow` does."""
        part = copy.copy(self)
        part.dual = self.dual.copy()
        part._keep(positions)
        return part

    def halves(self) -> list[Subproblem]:
        """The part cut in two at the node that most others depend on, cheaper configurations and
        dearer ones. None where only one choice was left, which a sweep has come upon.
        """
        open_nodes = {node for node, keep in enumerate(self.kept) if len(keep) > 1}
        if not open_nodes:
            return []
        node = max(
            open_nodes,
            key=lambda n: len(self.kept[n]) ** 0.5 * (1 + len(self.around[n] & open_nodes)),
        )
        cheapest = np.argsort(self.dual.reach[node], kind="stable")
        parts = []
        for places in np.split(cheapest, [len(cheapest) // 2]):
            positions = [np.arange(len(keep)) for keep in self.kept]
            positions[node] = np.sort(places)
            with suppress(InfeasibleError):
                parts.append(self.cut(positions))
        return parts


SHARES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Of the gap: configurations are eliminated up to the first of these thresholds whose work is
allowed.
"""


class Incumbent:
    """The best choice known of a merged model within a memory limit (bytes)."""

    def __init__(self, model: MinSum, limit: Number = math.inf, bound: float = -math.inf) -> None:
        self.model = model
        self.limit = limit
        self.bound = bound
        self.choice: tuple[int, ...] = ()
        """() before there is one."""
        self.cost: Number = math.inf
        self.memory: Number = 0
        """Bytes of the choice, where they are limited."""

    def offer(self, choice: Sequence[int]) -> None:
        """Take the choice if it fits and costs less."""
        cost = self.model.cost_of(choice)
        if self.choice and cost >= self.cost:
            return
        memory = 0 if self.limit == math.inf else self.model.memory_of(choice)
        if memory <= self.limit:
            self.choice = tuple(choice)
            self.cost = cost
            self.memory = memory


class Objective(Incumbent):
    """The goal of a search: the least cost of a merged model, whatever memory it needs. No choice
    costs less than `bound` in the model that is searched.
    """

    @property
    def cutoff(self) -> float:
        """A part in whose model everything costs as much holds nothing better."""
        return float(self.cost)

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """Offer the best choice of as many of the part's cheapest configurations as can be
        eliminated with the work. Returns what that proves, `low` being known: that all choices in
        the part which are better than the best known cost no less. And the work that it took.
        Configurations up to a threshold are eliminated by tables: where none of their choices costs
        as little, none of the part's does.
        """
        top = min(self.cutoff, max(float(reach.max()) for reach in part.dual.reach))
        for share in SHARES:
            threshold = low + share * (top - low)
            positions = part.within(threshold)
            sizes = [len(places) for places in positions]
            around = with_choice(part.around, sizes)
            order = smallest_table(around, sizes)
            entries, needed = size(around, sizes, order)
            if needed <= work and 8 * entries <= MAX_BYTES:
                kept = part.at(positions)
                with suppress(InfeasibleError):
                    found = eliminate_in(conditioned(restricted(self.model, kept)), order)
                    self.offer(chosen(kept, found.choice))
                return self.cutoff if share == 1.0 else min(threshold, self.cutoff), needed
        return low, 0.0


PROGRESS = 0.1
"""Sweeps go on while a pair of them closes this share of the gap."""
PATIENCE = 50
"""Where sweeps do not help, elimination may take this many times their work before the part is cut
in two.
"""
SMALL = 1e5
"""Sums that an elimination may always compare."""


def search(root: Subproblem, goal: Objective, budget: Budget) -> float:
    """Find the goal's best choice in a part; what is proven: nothing better costs less, in the
    model that is searched. That is at least the goal's cutoff where its best choice is proven to be
    the best.
    """
    parts = [(max(goal.bound, root.bound), 0, root)]
    created = 0
    while parts and parts[0][0] < goal.cutoff:
        bound, number, part = heappop(parts)
        bound = _refine(part, bound, goal, budget)
        if bound >= goal.cutoff:
            continue
        if not budget.left:
            heappush(parts, (bound, number, part))
            break
        for half in part.halves():
            created += 1
            heappush(parts, (max(bound, half.bound), created, half))
    return min(parts[0][0], goal.cutoff) if parts else goal.cutoff


def _refine(part: Subproblem, bound: float, goal: Objective, budget: Budget) -> float:
    """Improve the goal's choice and the part's bound, which is returned; the cutoff if the part is
    exhausted.
    """
    work = 0.0
    before = -math.inf
    while True:
        for forward in (True, False):
            goal.offer(part.sweep(forward))
            work += part.dual.work
            budget.spend(part.dual.work)
        try:
            part.narrow(goal.cutoff)
        except InfeasibleError:
            return goal.cutoff
        stalled = part.bound - before < PROGRESS * (goal.cutoff - before)
        before = part.bound
        bound = max(bound, part.bound)
        if bound < goal.cutoff:
            allowed = max(SMALL, min(budget.left, work * (PATIENCE if stalled else 1)))
            bound, took = goal.eliminate(part, bound, allowed)
            budget.spend(took)
        if stalled or bound >= goal.cutoff or not budget.left:
            return bound


class ReducedStart:
    """A merged model without its nodes of few neighbours, and all that is left as a part to be
    searched.
    """

    def __init__(self, model: MinSum, budget: Budget) -> None:
        """Raises InfeasibleError where every choice is forbidden, as far as pairs show it."""
        self._model = model
        self.reduction = reduced(model, sum(edge.costs.size for edge in model.edges))
        budget.spend(self.reduction.work)
        self.part = Subproblem(self.reduction.model, everything(self.reduction.model))

    def solve(self, budget: Budget) -> Assignment:
        """The best choice, whatever memory it needs; with bound and gap where the budget ends
        first. Raises InfeasibleError where every choice is forbidden. Where none was found in time,
        the answer's cost is inf.
        """
        goal = Objective(self.reduction.model)
        bound = search(self.part, goal, budget)
        proven = bound >= goal.cutoff
        if proven and math.isinf(goal.cost):
            raise no_choice()
        choice = self.reduction.expanded(goal.choice)
        cost = self._model.cost_of(choice)
        return Assignment(
            choice, cost, bound_of(bound, cost, proven), proven, self._model.memory_of(choice)
        )
