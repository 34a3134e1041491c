"""Minimum cost within a memory limit, for min-sum models.

The search has two steps:

1. Lagrangian relaxation. For a multiplier `rate` >= 0, in cost per byte, let g(rate) be the minimum
   of the relaxed cost, cost + rate * memory, over all choices. Each choice within the limit costs
   at least g(rate) - rate * limit. `_best_rate` searches the rate with the highest such bound.
2. Branch and bound over the choices whose relaxed cost is below the best known cost + rate * limit.
   Its elimination uses lists of labels instead of tables. A label is the (cost, memory) of one
   choice of some nodes. The scope of a list are those of its nodes that are not eliminated yet. A
   label is dropped if another label with equal configurations of the scope dominates it: that label
   costs no more and needs no more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.branch_and_bound import (
    GAP_FRACTIONS,
    Objective,
    ReducedStart,
    Subproblem,
    search,
)
from autopipe.passes.solvers.min_sum.elimination import smallest_table_order, undecided_graph
from autopipe.passes.solvers.min_sum.model import (
    Array,
    Assignment,
    Budget,
    KeptConfigurations,
    MinSum,
    Number,
    absorb_fixed_nodes,
    add_memory_cost,
    configurations_at,
    memory_as_cost,
    reported_bound,
    restrict,
)

RELATIVE_TOLERANCE = 1e-9
"""Relative difference of costs up to which a choice counts as being on the line of a hull edge, not
below it.
"""


@dataclass(slots=True)
class HullEdge:
    """Two choices of one configuration per node, one above the memory limit and one within it, as
    points (memory, cost) in a plane. The negative slope of the line through both points is the next
    Lagrange multiplier.

    The best choice for a multiplier is a point where a line with this slope touches the lower
    convex hull of all points. If this point is below the line through the two choices, it replaces
    the choice on its side of the limit. If no point is below the line, the line is an edge of the
    hull, and its negative slope is the multiplier with the highest bound.
    """

    limit: Number
    over: Assignment
    """Choice above the limit."""
    under: Assignment
    """Choice within the limit."""

    @property
    def is_open(self) -> bool:
        """True if the choice above the limit costs less and needs more memory than the choice
        within the limit, so that `rate` is positive.
        """
        return self.over.cost < self.under.cost and self.over.memory > self.under.memory

    @property
    def rate(self) -> float:
        """Negative slope of the line through both choices, in cost per byte."""
        return float(self.under.cost - self.over.cost) / float(self.over.memory - self.under.memory)

    def is_improved_by(self, cost: Number, rate: float) -> bool:
        """True if a choice with the relaxed cost `cost` (cost + rate * memory) is below the line
        through both choices. `rate` is the negative slope of this line.
        """
        line = self.over.cost + rate * self.over.memory
        return cost < line - RELATIVE_TOLERANCE * abs(line)

    def replace_point(self, point: Assignment) -> None:
        """Replace the choice that is on the same side of the memory limit as `point` by `point`."""
        if point.memory <= self.limit:
            self.under = point
        else:
            self.over = point


MAX_JOIN_FACTOR = 16
"""Maximum number of labels that a join may form, as a multiple of the maximum number of labels of a
list.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront:
    """A list of labels, as columns of equal length. A label is the cost and memory of one choice of
    some nodes. The scope are those of these nodes that are not eliminated yet.
    """

    configurations: dict[int, Array]
    """For each node of the scope, its configuration in each label."""
    cost: Array
    """Cost of each label."""
    memory: Array
    """Bytes of each label."""
    bounds: Array
    """For each label, a lower bound on the relaxed cost of all choices that contain it."""
    rows: dict[int, Array]
    """By index of an eliminated node: for each label, a position in the list of labels from which
    the node was eliminated. The label at this position states the configuration of the node, and
    leads to nodes that were eliminated earlier.
    """
    minimum_bytes: Number
    """Sum of the minimum bytes of all nodes whose memory is part of `memory`."""

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, labels: Array) -> ParetoFront:
        """Return a list of the labels at these indices."""
        configurations, rows = (
            {node: column[labels] for node, column in each.items()}
            for each in (self.configurations, self.rows)
        )
        return ParetoFront(
            configurations,
            self.cost[labels],
            self.memory[labels],
            self.bounds[labels],
            rows,
            self.minimum_bytes,
        )


@dataclass(slots=True)
class LabelPruning:
    """Joins lists of labels, and drops labels that cannot become part of the cheapest choice within
    the memory limit.
    """

    sizes: Sequence[int]
    """Number of configurations of each node."""
    limit: Number
    """Memory limit: maximum bytes of a choice."""
    minimum_bytes: Number
    """Sum of the minimum bytes of all nodes."""
    rate: float
    """Lagrange multiplier of the relaxed cost (cost + rate * memory), in cost per byte."""
    configuration_bounds: Sequence[Array]
    """Per node and configuration, a lower bound on the relaxed cost of all choices that contain the
    configuration.
    """
    bound: float
    """Lower bound on the relaxed cost of all choices."""
    max_labels: int
    """Maximum number of labels of a list."""
    threshold: float
    """Labels whose lower bound reaches this cost are dropped. It is lowered if lists become too
    long.
    """
    label_count: int = 0
    """Number of labels formed so far."""

    def join(self, first: ParetoFront, second: ParetoFront) -> ParetoFront:
        """Return one label per pair of a label of `first` and a label of `second` that have equal
        configurations of their common nodes. A pair is omitted if the minimum memory of all other
        nodes would exceed the rest of the memory limit.

        While there are more than `MAX_JOIN_FACTOR` * `max_labels` pairs, the threshold is lowered,
        which drops labels.
        """
        shared = [node for node in second.configurations if node in first.configurations]
        while True:
            first = first.take(first.bounds < self.threshold)
            second = second.take(second.bounds < self.threshold)
            first_keys = self._keys(first, shared)
            second_keys = self._keys(second, shared)
            order = np.argsort(second_keys, kind="stable")
            start = np.searchsorted(second_keys[order], first_keys, "left")
            counts = np.searchsorted(second_keys[order], first_keys, "right") - start
            total = int(counts.sum())
            if total <= MAX_JOIN_FACTOR * self.max_labels:
                break
            self.threshold = float(np.median(np.concatenate([first.bounds, second.bounds])))
        self.label_count += total
        remaining = np.repeat(np.arange(len(first)), counts)
        right = order[np.arange(total) + np.repeat(start - np.cumsum(counts) + counts, counts)]
        minimum_bytes = first.minimum_bytes + second.minimum_bytes
        memory = first.memory[remaining] + second.memory[right]
        fits = memory <= self.limit - (self.minimum_bytes - minimum_bytes)
        first = first.take(remaining[fits])
        second = second.take(right[fits])
        return ParetoFront(
            second.configurations | first.configurations,
            first.cost + second.cost,
            memory[fits],
            np.maximum(first.bounds, second.bounds),
            first.rows | second.rows,
            minimum_bytes,
        )

    def prune(self, front: ParetoFront, scope: Iterable[int]) -> ParetoFront:
        """Return the labels of `front` that may be part of the cheapest choice.

        Labels with equal configurations of the nodes `scope` form a group: in any choice, each of
        them can be replaced by another label of the group. A label is dropped in two cases:

        - Another label of its group costs no more and needs no more memory (dominance).
        - Its lower bound reaches the threshold. This bound is the maximum of two bounds. One is its
          previous bound. The other is the maximum of the bounds of its configurations of `scope`,
          plus the difference of its relaxed cost and that of the cheapest label of its group.

        If more than `max_labels` labels remain, the threshold is lowered until the rest is at most
        `max_labels`.
        """
        groups, inverse = np.unique(self._keys(front, scope), return_inverse=True)
        relaxed_cost = front.cost + self.rate * front.memory
        cheapest = np.full(len(groups), np.inf)
        np.minimum.at(cheapest, inverse, relaxed_cost)
        scope_bounds = np.full(len(front), self.bound)
        for node in scope:
            of_node = self.configuration_bounds[node][front.configurations[node]]
            np.maximum(scope_bounds, of_node, out=scope_bounds)
        bounds = np.maximum(front.bounds, scope_bounds + (relaxed_cost - cheapest[inverse]))
        labels = np.flatnonzero(bounds < self.threshold)
        if len(labels):
            labels = labels[np.lexsort((front.cost[labels], front.memory[labels], inverse[labels]))]
            # Sort labels by group and then by memory. A label is not dominated if its cost is below
            # the cost of all earlier labels of its group, so compare it with a running minimum.
            # A multiple of the group's number is subtracted from the ranks of costs, so that they
            # are smaller than in earlier groups and the minimum starts again with each group.
            cost_rank = np.unique(front.cost[labels], return_inverse=True)[1]
            rank = cost_rank - inverse[labels] * len(labels)
            labels = labels[np.r_[True, rank[1:] < np.minimum.accumulate(rank)[:-1]]]
        if len(labels) > self.max_labels:
            self.threshold = float(np.partition(bounds[labels], self.max_labels)[self.max_labels])
            labels = labels[bounds[labels] < self.threshold]
        return replace(front, bounds=bounds).take(labels)

    def _keys(self, front: ParetoFront, scope: Iterable[int]) -> Array:
        """Return one integer per label. Labels have equal integers only if they have equal
        configurations of the nodes `scope`.
        """
        keys = np.zeros(len(front), np.int64)
        for node in scope:
            keys = keys * self.sizes[node] + front.configurations[node]
        return keys


def eliminate_with_labels(
    model: MinSum, order: Sequence[int], pruning: LabelPruning, pair_bounds: Sequence[Array]
) -> tuple[int, ...] | None:
    """Return the cheapest choice within the memory limit whose relaxed cost is below the final
    threshold of `pruning`, or None if there is none.

    The model must be a result of `merge_edges` (at most one edge between two nodes). `order` is the
    elimination order. `pair_bounds` contains one matrix per edge, with a lower bound for each pair
    of configurations: on the relaxed cost of all choices that contain both.

    As in `eliminate_in_order`, each node has a bucket, and a list of labels is stored in the bucket
    of the first of its nodes in `order`. When a node is eliminated, the lists in its bucket are
    joined, and the result moves on to the bucket of its next node.
    """
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[ParetoFront]] = {node: [] for node in order}

    def add_labels(
        nodes: tuple[int, ...],
        costs: Array,
        memory: Array | None,
        configuration_bounds: Array,
        minimum_bytes: Number,
    ) -> None:
        """Add a list of labels to those of the first node of `nodes` that will be eliminated: one
        label per entry of `costs`, the vector of a node or the matrix of an edge. Forbidden
        entries, and entries whose bound reaches the threshold, are omitted.
        """
        allowed = np.nonzero((configuration_bounds < pruning.threshold) & np.isfinite(costs))
        bytes_of_labels = np.zeros(len(allowed[0]), np.int64) if memory is None else memory[allowed]
        configurations = dict(zip(nodes, allowed, strict=True))
        front = ParetoFront(
            configurations,
            costs[allowed],
            bytes_of_labels,
            configuration_bounds[allowed],
            {},
            minimum_bytes,
        )
        buckets[min(nodes, key=position.__getitem__)].append(front)

    for node, minimum_bytes in enumerate(model.minimum_memory()):
        add_labels(
            (node,),
            model.costs[node],
            model.node_memory[node],
            pruning.configuration_bounds[node],
            minimum_bytes,
        )
    for edge, configuration_bounds in zip(model.edges, pair_bounds, strict=True):
        add_labels((edge.source, edge.target), edge.costs, edge.memory, configuration_bounds, 0)
    below: dict[int, ParetoFront] = {}
    zero = np.zeros(1, np.int64)
    roots = ParetoFront({}, zero, zero, np.full(1, -np.inf), {}, 0)
    for node in order:
        front = buckets[node][0]
        for other in sorted(buckets[node][1:], key=len):
            front = pruning.join(front, other)
        scope = sorted(
            (other for other in front.configurations if other != node), key=position.__getitem__
        )
        front = below[node] = pruning.prune(front, scope)
        remaining = replace(
            front,
            configurations={other: front.configurations[other] for other in scope},
            rows={node: np.arange(len(front))},
        )
        if scope:
            buckets[scope[0]].append(remaining)
        else:
            roots = pruning.prune(pruning.join(roots, remaining), ())
        if not len(front):
            return None
    if not len(roots):
        return None
    # A label contains positions of labels, not configurations. Follow these positions from the
    # cheapest label to the configurations of all nodes.
    cheapest = int(np.argmin(roots.cost))
    found = [0] * len(order)
    waiting = [(node, int(rows[cheapest])) for node, rows in roots.rows.items()]
    while waiting:
        node, label = waiting.pop()
        found[node] = int(below[node].configurations[node][label])
        waiting += [(other, int(rows[label])) for other, rows in below[node].rows.items()]
    return tuple(found)


LABEL_WORK = 100
"""Assumed work of forming one label, as a number of sums (the unit of `Budget`)."""
MAX_CELLS = 1e7
"""Maximum number of pairs of configurations, over all edges of a model, for which elimination with
labels is tried.
"""
MAX_LABELS = 200_000
"""Maximum number of labels of a list."""


class MemoryLimitedObjective(Objective):
    """Goal of a search with a memory limit: the cheapest choice that fits in memory, and the best
    such choice known so far. The costs of the model that is searched are those of the given model
    plus `rate` per byte of memory.
    """

    rate = 0.0
    """Lagrange multiplier of the model that is searched, in cost per byte."""

    @property
    def cutoff(self) -> float:
        """Best known cost plus `rate` times the memory limit. A part of the searched model whose
        bound reaches it contains no better choice within the limit.
        """
        return float(self.cost) + self.rate * self.limit

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """Solve the part, restricted to configurations with bounds up to a threshold, by
        elimination with labels, and offer the result as best choice.

        Parameters and result are those of `Objective.eliminate`. The threshold is lowered if lists
        of labels become too long.
        """
        for fraction in GAP_FRACTIONS:
            threshold = low + fraction * (self.cutoff - low)
            positions = part.within(threshold)
            cells = part.dual.cells([len(of_node) for of_node in positions])
            if cells <= min(MAX_CELLS, work / LABEL_WORK):
                break
        else:
            return low, 0.0
        try:
            restricted = part.subset(positions)
        except InfeasibleError:
            return threshold, 0.0
        model = absorb_fixed_nodes(restrict(self.model, restricted.kept))
        sizes = [len(keep) for keep in restricted.kept]
        pruning = LabelPruning(
            sizes=sizes,
            limit=self.limit,
            minimum_bytes=sum(model.minimum_memory()),
            rate=self.rate,
            configuration_bounds=restricted.dual.configuration_bounds,
            bound=self.bound,
            max_labels=min(MAX_LABELS, max(1, round(work / LABEL_WORK / len(sizes)))),
            threshold=threshold + 2 * part.dual.rounding,
        )
        pair_bounds = [pair for pair in restricted.dual.pair_bounds() if 1 not in pair.shape]
        order = smallest_table_order(undecided_graph(restricted.around, sizes), sizes)
        found = eliminate_with_labels(model, order, pruning, pair_bounds)
        if found:
            self.offer(configurations_at(restricted.kept, found))
        return max(
            low, min(pruning.threshold - part.dual.rounding, self.cutoff)
        ), LABEL_WORK * pruning.label_count


MIN_SHRINK_FACTOR = 4
"""Minimum factor by which the model must become smaller if it is restricted to the remaining
configurations. Smaller reductions are not made, because a restriction can make equal layers
different, so that their tables are computed separately.
"""
RATE_WORK_FRACTION = 0.1
"""Fraction of the remaining work that the search with one multiplier may do. The bound of this
search is valid even if its result is not proven.
"""
COARSE_GAP = 0.02
"""Fraction of the best known cost. If the gap is larger, the search with a multiplier first does
only two sweeps and a small elimination. It continues only if these do not improve the hull edge.
"""
SWEEP_ROUNDS = 3
"""Number of times that the reduced model is swept forward and backward before the final search."""


def solve_within_limit(
    model: MinSum, limit: Number, free: Assignment, budget: Budget
) -> Assignment:
    """Return the cheapest choice that needs at most `limit` bytes, or the choice with the smallest
    memory found if none fits. The model has at most one edge between two nodes.

    If the budget ends first, the result is the best choice found, with a lower bound. `free` is the
    cheapest choice without a memory limit. Raise InfeasibleError if every choice is forbidden.
    """
    least_memory = ReducedStart(memory_as_cost(model), budget).solve(budget)
    cost = model.cost_of(least_memory.choice)
    if least_memory.cost > limit:
        return Assignment(
            least_memory.choice, cost, cost, least_memory.proven, least_memory.cost, fits=False
        )
    goal = MemoryLimitedObjective(model, limit, float(free.bound))
    goal.offer(least_memory.choice)
    # A configuration can be part of a choice that fits only if it fits while all other nodes have
    # their minimum memory. Drop all other configurations.
    spare = limit - sum(model.minimum_memory())
    kept = [
        np.arange(len(costs)) if memory is None else np.flatnonzero(memory - memory.min() <= spare)
        for costs, memory in zip(model.costs, model.node_memory, strict=True)
    ]
    bound, kept = _best_rate(
        goal, kept, HullEdge(limit, free, replace(least_memory, cost=cost)), budget
    )
    proven = bound >= goal.cost
    if not proven and budget.left:
        # The bound of the best multiplier does not prove that the choice is optimal. A better
        # choice within the limit would cost less than `goal.cutoff` in the relaxed model, so only
        # these choices are searched.
        start = ReducedStart(add_memory_cost(restrict(model, kept), goal.rate), budget)
        for _ in range(SWEEP_ROUNDS):
            remaining = _sweep_and_prune(start, goal, goal.rate, kept, budget)
        reached = (
            goal.cutoff
            if remaining is None
            else search(Subproblem(add_memory_cost(model, goal.rate), remaining), goal, budget)
        )
        proven = reached >= goal.cutoff
        bound = max(bound, reached - goal.rate * limit)
    return Assignment(
        goal.choice, goal.cost, reported_bound(bound, goal.cost, proven), proven, goal.memory
    )


def _best_rate(
    goal: MemoryLimitedObjective, kept: list[Array], edge: HullEdge, budget: Budget
) -> tuple[float, list[Array]]:
    """Search for the Lagrange multiplier with the highest lower bound, and store it in `goal`.
    Return (bound, kept).

    bound: the highest lower bound that was found for choices within the memory limit.
    kept: the configurations of `kept` that may be part of a better choice than the best known one.

    `edge` contains the cheapest choice and the choice with the smallest memory.
    """
    model = goal.model
    bound = float(edge.over.bound)
    while budget.left and bound < goal.cost and edge.is_open:
        rate = edge.rate
        start = ReducedStart(add_memory_cost(restrict(model, kept), rate), budget)
        remaining = _sweep_and_prune(start, goal, rate, kept, budget)
        if remaining is None:
            return float(goal.cost), kept
        found = start.solve(
            budget.fraction_of_rest(
                0.0 if goal.cost - bound > COARSE_GAP * abs(goal.cost) else RATE_WORK_FRACTION
            )
        )
        if not found.proven and not edge.is_improved_by(found.cost, rate):
            found = start.solve(budget.fraction_of_rest(RATE_WORK_FRACTION))
        choice = configurations_at(kept, found.choice)
        goal.offer(choice)
        if found.bound - rate * goal.limit > bound:
            bound = float(found.bound) - rate * goal.limit
            goal.rate = rate
            goal.bound = float(found.bound)
        if not edge.is_improved_by(found.cost, rate):
            break
        edge.replace_point(replace(found, choice=choice, cost=model.cost_of(choice)))
        if MIN_SHRINK_FACTOR * model.cells([len(keep) for keep in remaining]) < model.cells(
            [len(keep) for keep in kept]
        ):
            kept = remaining
    return bound, kept


def _sweep_and_prune(
    start: ReducedStart,
    goal: MemoryLimitedObjective,
    rate: float,
    kept: KeptConfigurations,
    budget: Budget,
) -> list[Array] | None:
    """Sweep the part of `start` forward and backward, and offer the choices found to `goal`. Return
    the configurations of `kept` that may be part of a better choice, or None if a node has none.

    `start` is the model restricted to `kept`, with costs increased by `rate` per byte.
    """
    part = start.part
    reduction = start.reduction
    for forward in (True, False):
        goal.offer(configurations_at(kept, reduction.expand_choice(part.sweep(forward))))
        budget.spend(part.dual.work)
    cutoff = float(goal.cost) + rate * goal.limit
    remaining = list(kept)
    for node, keep in zip(reduction.nodes, part.at(part.within(cutoff)), strict=True):
        remaining[node] = kept[node][keep]
    return remaining if all(len(keep) for keep in remaining) else None
