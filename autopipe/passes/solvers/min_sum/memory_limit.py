"""The least cost within a memory limit.

A price for each byte turns the limit into costs; the least cost at any price bounds the least cost
within the limit (Lagrangian relaxation). The price is moved to where the bound is highest. What
remains between the bound and the best choice that fits is eliminated with lists of labels, pairs of
cost and memory that nothing beats, in place of tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.branch_and_bound import (
    SHARES,
    Objective,
    ReducedStart,
    Subproblem,
    search,
)
from autopipe.passes.solvers.min_sum.elimination import smallest_table, with_choice
from autopipe.passes.solvers.min_sum.model import (
    Array,
    Assignment,
    Budget,
    Kept,
    MinSum,
    Number,
    bound_of,
    chosen,
    conditioned,
    memory_alone,
    priced,
    restricted,
)

FLAT = 1e-9
"""Of a cost: a price whose best choice is better by less tells nothing new."""


@dataclass(slots=True)
class HullEdge:
    """Two choices, one over a memory limit and one within, as points (memory, cost) whose distance
    gives the next price of a byte.

    The best choice at a price is where a line of that slope touches the lower hull of all points,
    and its bound less the price of all bytes of the limit bounds what fits. Between choices on
    either side of the limit the slope leads to a point below their edge, which takes the place of
    one of them. Where there is none, the edge is the hull's own: among all prices its slope is that
    of the highest bound.
    """

    limit: Number
    over: Assignment
    under: Assignment

    @property
    def is_open(self) -> bool:
        """True if the one over the limit costs less, which alone gives a price."""
        return self.over.cost < self.under.cost and self.over.memory > self.under.memory

    @property
    def rate(self) -> float:
        return float(self.under.cost - self.over.cost) / float(self.over.memory - self.under.memory)

    def is_above(self, cost: Number, rate: float) -> bool:
        """True if a choice that costs this much at the price `rate` lies below the edge."""
        line = self.over.cost + rate * self.over.memory
        return cost < line - FLAT * abs(line)

    def move(self, point: Assignment) -> None:
        if point.memory <= self.limit:
            self.under = point
        else:
            self.over = point


SPREAD = 16
"""A join may form this many times the labels that a list may keep."""


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront:
    """Labels as columns of equal length."""

    at: dict[int, Array]
    """Of each node of the scope: its configuration."""
    cost: Array
    memory: Array
    reach: Array
    """No choice that a label is part of costs less, bytes at their price included."""
    rows: dict[int, Array]
    """By node that is eliminated below: the label of its list that this one is made of."""
    least: Number
    """Bytes that the nodes counted in `memory` need at least."""

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, labels: Array) -> ParetoFront:
        at, rows = (
            {node: column[labels] for node, column in each.items()} for each in (self.at, self.rows)
        )
        return ParetoFront(
            at, self.cost[labels], self.memory[labels], self.reach[labels], rows, self.least
        )


@dataclass(slots=True)
class Sieve:
    """Keeps the labels that may still become the cheapest choice within the limit. All nodes may
    need `limit` bytes together, and need `least` at least. Of every node `sizes` has the number of
    its configurations, and no choice with one of them costs less than `floors` says; none at all
    less than `bound`. In both, as in the labels' reach, a byte costs `rate`.
    """

    sizes: Sequence[int]
    limit: Number
    least: Number
    rate: float
    floors: Sequence[Array]
    bound: float
    room: int
    """Labels that a list may keep."""
    threshold: float
    """Only labels that reach this are dropped for their cost. It falls where lists would become too
    long.
    """
    formed: int = 0

    def join(self, one: ParetoFront, other: ParetoFront) -> ParetoFront:
        """All pairs of labels that agree on the nodes both know, and leave memory for the rest."""
        shared = [node for node in other.at if node in one.at]
        while True:
            one, other = (front.take(front.reach < self.threshold) for front in (one, other))
            mine = self._keys(one, shared)
            theirs = self._keys(other, shared)
            sort = np.argsort(theirs, kind="stable")
            start = np.searchsorted(theirs[sort], mine, "left")
            counts = np.searchsorted(theirs[sort], mine, "right") - start
            total = int(counts.sum())
            if total <= SPREAD * self.room:
                break
            self.threshold = float(np.median(np.concatenate([one.reach, other.reach])))
        self.formed += total
        left = np.repeat(np.arange(len(one)), counts)
        right = sort[np.arange(total) + np.repeat(start - np.cumsum(counts) + counts, counts)]
        least = one.least + other.least
        memory = one.memory[left] + other.memory[right]
        fits = memory <= self.limit - (self.least - least)
        first = one.take(left[fits])
        second = other.take(right[fits])
        reach = np.maximum(first.reach, second.reach)
        cost = first.cost + second.cost
        return ParetoFront(
            second.at | first.at, cost, memory[fits], reach, first.rows | second.rows, least
        )

    def sift(self, front: ParetoFront, scope: Iterable[int]) -> ParetoFront:
        """Labels that may be part of the cheapest choice, of labels that make the same choice in
        the scope. Where two agree there, one can stand for the other. So a label goes if another
        costs and needs no more; and no choice with it can cost less than the least of its scope and
        its excess over the cheapest label.
        """
        groups, inverse = np.unique(self._keys(front, scope), return_inverse=True)
        value = front.cost + self.rate * front.memory
        cheapest = np.full(len(groups), np.inf)
        np.minimum.at(cheapest, inverse, value)
        floor = np.full(len(front), self.bound)
        for node in scope:
            np.maximum(floor, self.floors[node][front.at[node]], out=floor)
        reach = np.maximum(front.reach, floor + (value - cheapest[inverse]))
        labels = np.flatnonzero(reach < self.threshold)
        if len(labels):
            labels = labels[np.lexsort((front.cost[labels], front.memory[labels], inverse[labels]))]
            # Ranks of later groups lie below those of earlier ones, so that the running least
            # begins anew with each.
            rank = np.unique(front.cost[labels], return_inverse=True)[1] - inverse[labels] * len(
                labels
            )
            labels = labels[np.r_[True, rank[1:] < np.minimum.accumulate(rank)[:-1]]]
        if len(labels) > self.room:
            self.threshold = float(np.partition(reach[labels], self.room)[self.room])
            labels = labels[reach[labels] < self.threshold]
        return replace(front, reach=reach).take(labels)

    def _keys(self, front: ParetoFront, scope: Iterable[int]) -> Array:
        """One number for every choice of the scope."""
        keys = np.zeros(len(front), np.int64)
        for node in scope:
            keys = keys * self.sizes[node] + front.at[node]
        return keys


def eliminate_within(
    model: MinSum, order: Sequence[int], sieve: Sieve, pairs: Sequence[Array]
) -> tuple[int, ...] | None:
    """The cheapest choice within the memory limit among those below the sieve's last threshold;
    None if there is none. Takes a merged model, and for each of its edges a matrix: no choice with
    that pair costs less. As in `eliminate_in`, a list waits in the bucket of the first of its nodes
    to go, and is passed on without it.
    """
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[ParetoFront]] = {node: [] for node in order}

    def add(
        ends: tuple[int, ...], costs: Array, memory: Array | None, floors: Array, least: Number
    ) -> None:
        """Entries of a vector or matrix that are not forbidden, and below the threshold, as
        labels.
        """
        allowed = np.nonzero((floors < sieve.threshold) & np.isfinite(costs))
        needs = np.zeros(len(allowed[0]), np.int64) if memory is None else memory[allowed]
        at = dict(zip(ends, allowed, strict=True))
        front = ParetoFront(at, costs[allowed], needs, floors[allowed], {}, least)
        buckets[min(ends, key=position.__getitem__)].append(front)

    for node, least in enumerate(model.least_memory()):
        add((node,), model.costs[node], model.node_memory[node], sieve.floors[node], least)
    for edge, floors in zip(model.edges, pairs, strict=True):
        add((edge.source, edge.target), edge.costs, edge.memory, floors, 0)
    below: dict[int, ParetoFront] = {}
    nothing = np.zeros(1, np.int64)
    roots = ParetoFront({}, nothing, nothing, np.full(1, -np.inf), {}, 0)
    for node in order:
        front = buckets[node][0]
        for other in sorted(buckets[node][1:], key=len):
            front = sieve.join(front, other)
        scope = sorted((other for other in front.at if other != node), key=position.__getitem__)
        front = below[node] = sieve.sift(front, scope)
        left = replace(
            front,
            at={other: front.at[other] for other in scope},
            rows={node: np.arange(len(front))},
        )
        if scope:
            buckets[scope[0]].append(left)
        else:
            roots = sieve.sift(sieve.join(roots, left), ())
        if not len(front):
            return None
    if not len(roots):
        return None
    # The choice behind the cheapest label.
    cheapest = int(np.argmin(roots.cost))
    found = [0] * len(order)
    waiting = [(node, int(rows[cheapest])) for node, rows in roots.rows.items()]
    while waiting:
        node, label = waiting.pop()
        found[node] = int(below[node].at[node][label])
        waiting += [(other, int(rows[label])) for other, rows in below[node].rows.items()]
    return tuple(found)


LABEL = 100
"""Sums that could be compared in the time that a label takes."""
MAX_CELLS = 1e7
"""Pairs of configurations that are looked at one by one."""
MAX_ROOM = 200_000
"""Labels that a list may keep."""


class MemoryLimitedObjective(Objective):
    """The least cost within a memory limit; what is searched is the model with a price for
    bytes.
    """

    rate = 0.0
    """Cost of a byte in the model that is searched."""

    @property
    def cutoff(self) -> float:
        """The least cost known, and the price of all bytes there are."""
        return float(self.cost) + self.rate * self.limit

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """As `Objective` does, by lists of labels; the threshold is lowered where lists become too
        long.
        """
        for share in SHARES:
            threshold = low + share * (self.cutoff - low)
            positions = part.within(threshold)
            if part.dual.cells([len(places) for places in positions]) <= min(
                MAX_CELLS, work / LABEL
            ):
                break
        else:
            return low, 0.0
        try:
            few = part.cut(positions)
        except InfeasibleError:
            return threshold, 0.0
        model = conditioned(restricted(self.model, few.kept))
        sizes = [len(keep) for keep in few.kept]
        sieve = Sieve(
            sizes=sizes,
            limit=self.limit,
            least=sum(model.least_memory()),
            rate=self.rate,
            floors=few.dual.reach,
            bound=self.bound,
            room=min(MAX_ROOM, max(1, round(work / LABEL / len(sizes)))),
            threshold=threshold + 2 * part.dual.rounding,
        )
        pairs = [pair for pair in few.dual.pairs() if 1 not in pair.shape]
        order = smallest_table(with_choice(few.around, sizes), sizes)
        found = eliminate_within(model, order, sieve, pairs)
        if found:
            self.offer(chosen(few.kept, found))
        return max(
            low, min(sieve.threshold - part.dual.rounding, self.cutoff)
        ), LABEL * sieve.formed


FEW = 4
"""A reduced model is searched alone once it is this many times smaller; until then equal layers
stay equal.
"""
ONE_PRICE = 0.1
"""Of the work left: what the search at one price may take; its bound is one even where its answer
is not proven.
"""
COARSE = 0.02
"""Of the cost: as long as the gap is wider, two more sweeps at a price must do."""
ROUNDS = 3
"""Pairs of sweeps of the smaller model before the whole one is searched."""


def solve_within(model: MinSum, limit: Number, free: Assignment, budget: Budget) -> Assignment:
    """The best choice of a merged model that needs no more than `limit` bytes; where none fits,
    that of least memory. `free` is the best without a limit. Raises InfeasibleError where every
    choice is forbidden.
    """
    least = ReducedStart(memory_alone(model), budget).solve(budget)
    cost = model.cost_of(least.choice)
    if least.cost > limit:
        return Assignment(least.choice, cost, cost, least.proven, least.cost, fits=False)
    goal = MemoryLimitedObjective(model, limit, float(free.bound))
    goal.offer(least.choice)
    # Of every node the configurations that fit beside the least of all others.
    spare = limit - sum(model.least_memory())
    kept = [
        np.arange(len(costs)) if memory is None else np.flatnonzero(memory - memory.min() <= spare)
        for costs, memory in zip(model.costs, model.node_memory, strict=True)
    ]
    bound, kept = _price(goal, kept, HullEdge(limit, free, replace(least, cost=cost)), budget)
    proven = bound >= goal.cost
    if not proven and budget.left:
        # What may cost no more than the best choice known at the best price is searched.
        start = ReducedStart(priced(restricted(model, kept), goal.rate), budget)
        for _ in range(ROUNDS):
            left = _swept(start, goal, goal.rate, kept, budget)
        reached = (
            goal.cutoff
            if left is None
            else search(Subproblem(priced(model, goal.rate), left), goal, budget)
        )
        proven = reached >= goal.cutoff
        bound = max(bound, reached - goal.rate * limit)
    return Assignment(
        goal.choice, goal.cost, bound_of(bound, goal.cost, proven), proven, goal.memory
    )


def _price(
    goal: MemoryLimitedObjective, kept: list[Array], edge: HullEdge, budget: Budget
) -> tuple[float, list[Array]]:
    """The highest bound of any price, which the goal takes for its own, and what may be in a better
    choice.
    """
    model = goal.model
    bound = float(edge.over.bound)
    while budget.left and bound < goal.cost and edge.is_open:
        rate = edge.rate
        start = ReducedStart(priced(restricted(model, kept), rate), budget)
        left = _swept(start, goal, rate, kept, budget)
        if left is None:
            return float(goal.cost), kept
        found = start.solve(
            budget.share(0.0 if goal.cost - bound > COARSE * abs(goal.cost) else ONE_PRICE)
        )
        if not found.proven and not edge.is_above(found.cost, rate):
            found = start.solve(budget.share(ONE_PRICE))
        choice = chosen(kept, found.choice)
        goal.offer(choice)
        if found.bound - rate * goal.limit > bound:
            bound = float(found.bound) - rate * goal.limit
            goal.rate = rate
            goal.bound = float(found.bound)
        if not edge.is_above(found.cost, rate):
            break
        edge.move(replace(found, choice=choice, cost=model.cost_of(choice)))
        if FEW * model.cells([len(keep) for keep in left]) < model.cells(
            [len(keep) for keep in kept]
        ):
            kept = left
    return bound, kept


def _swept(
    start: ReducedStart, goal: MemoryLimitedObjective, rate: float, kept: Kept, budget: Budget
) -> list[Array] | None:
    """Configurations left of `kept` after a sweep forth and one back; None if there are none."""
    part = start.part
    reduction = start.reduction
    for forward in (True, False):
        goal.offer(chosen(kept, reduction.expanded(part.sweep(forward))))
        budget.spend(part.dual.work)
    cutoff = float(goal.cost) + rate * goal.limit
    left = list(kept)
    for node, keep in zip(reduction.nodes, part.at(part.within(cutoff)), strict=True):
        left[node] = kept[node][keep]
    return left if all(len(keep) for keep in left) else None
