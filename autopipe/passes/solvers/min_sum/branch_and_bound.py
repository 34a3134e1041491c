"""Branch and bound for min-sum models without a memory limit: dual bound, pruning of
configurations, exact elimination of nodes, and branching.

A part of the search (`Subproblem`) contains a set of configurations of each node. Sweeps of the
dual raise a lower bound per configuration: on the cost of any choice that contains it.
Configurations whose bound exceeds the best known cost are dropped. The part restricted to the
configurations whose bound is at most a threshold is then solved exactly by elimination. If the
result costs no more than the threshold, it is optimal for the whole part, because each choice with
another configuration costs more. Otherwise the part is split in two, and the part with the lowest
bound is searched next.
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
    eliminate_in_order,
    elimination_size,
    neighbours,
    reduce_model,
    smallest_table_order,
    undecided_graph,
)
from autopipe.passes.solvers.min_sum.model import (
    BLOCK_ENTRIES,
    CALL_OVERHEAD,
    AllowedConfigurations,
    Array,
    Assignment,
    Budget,
    KeptConfigurations,
    MinSum,
    Number,
    absorb_fixed_nodes,
    all_configurations,
    all_forbidden_error,
    configurations_at,
    index_blocks,
    reported_bound,
    restrict,
)

ROUNDING = 1e-11
"""Assumed maximum of the relative rounding error of a sum of many terms. The error of a sum of two
terms is about 1e-16.
"""


class Dual:
    """Lower bounds by reparametrisation of a min-sum model with sequential message passing (TRW-S:
    Kolmogorov, 2006; SRMP: Kolmogorov, 2015).

    Costs can be moved from an edge to its ends without changing the cost of any choice. Let c_s(x)
    be the current cost of configuration x at node s, and C_st(x, y) the cost of an edge minus what
    was moved from it. A forward sweep visits the nodes in ascending order; for each node t:

    1. Collect: for each edge (s, t) from an earlier node s, move min over x of C_st(x, y) to
       c_t(y).
    2. Subtract m = min over y of c_t(y) from c_t, and add m to `bound`. The rest r(y) is 0 or more,
       and `bound` + r(y) is a lower bound of all choices with configuration y at t.
    3. Distribute: move r(y) / max(number of earlier neighbours, number of later neighbours) back to
       each edge from t to a later node.

    A backward sweep does the same in descending order. For a chain, one forward and one backward
    sweep make all bounds exact.

    Each configuration of the model must be part of a choice without forbidden pairs of neighbours
    (`AllowedConfigurations`). Time of a sweep: O(sum of the sizes of the edges' matrices).
    """

    bound: float
    """Lower bound of the cost of all choices, up to rounding."""
    configuration_bounds: list[Array]
    """Per node and configuration, a lower bound of all choices with this configuration, up to
    rounding.
    """
    rounding: float
    """Upper bound of the rounding error of `bound` and `configuration_bounds`."""

    def __init__(self, model: MinSum) -> None:
        """Make the dual of `model`, which must be a result of `merge_edges` (at most one edge
        between two nodes, from the lower to the higher index).
        """
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
        row_minima: dict[int, Array] = {}
        for matrix in self._matrices:
            if id(matrix) not in row_minima:
                row_minima[id(matrix)] = matrix.min(axis=1)
        to_source = [row_minima[id(matrix)].copy() for matrix in self._matrices]
        self._messages = to_source, [np.zeros(matrix.shape[1]) for matrix in self._matrices]
        """(to sources, to targets): two lists with one vector per edge, the costs that were moved
        from the edge to each configuration of its source, and of its target.
        """
        parts = [costs.min() for costs in self._costs] + [costs.min() for costs in to_source]
        self.rounding = ROUNDING * float(np.abs(parts).sum())
        self.bound = 0.0
        rests = [self._extract_minimum(node) for node in range(len(self._costs))]
        self.configuration_bounds = [rest + self.bound for rest in rests]

    @property
    def work(self) -> int:
        """Work of one sweep, in the unit of `Budget`: sums that are formed and compared, and
        overhead.
        """
        return self.cells([len(costs) for costs in self._costs]) + CALL_OVERHEAD * (
            len(self._ends) + len(self._costs)
        )

    def cells(self, sizes: Sequence[int]) -> int:
        """Return the number of sums that a sweep forms if node i has `sizes[i]` configurations."""
        return sum(sizes[source] * sizes[target] for source, target in self._ends)

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """Sweep in ascending order of the nodes if `forward`, otherwise in descending order. Return
        a choice: each node takes its cheapest configuration, given the configurations of the nodes
        visited before.
        """
        choice = [0] * len(self._costs)
        for node, visited, unvisited in self._visits(forward):
            total = self._costs[node] + sum(self._messages[not forward][edge] for edge in unvisited)
            for edge in visited:
                source, target = self._ends[edge]
                matrix = self._matrices[edge]
                total = total + (matrix[choice[source]] if forward else matrix[:, choice[target]])
            choice[node] = int(total.argmin())
            self._visit(node, visited, unvisited, forward)
        return tuple(choice)

    def tighten(self) -> None:
        """Sweep forward and backward to raise the bounds."""
        for forward in (True, False):
            for node, visited, unvisited in self._visits(forward):
                self._visit(node, visited, unvisited, forward)

    def pair_bounds(self) -> list[Array]:
        """Sweep backward. Return one matrix per edge, with a lower bound for each pair of
        configurations: on the cost of all choices that contain both.
        """
        pair_bounds = list(self._matrices)
        for node, visited, unvisited in self._visits(forward=False):
            rest = self._visit(node, visited, unvisited, forward=False)
            for edge in visited:
                moved = self._matrices[edge] - self._messages[1][edge]
                pair_bounds[edge] = moved + (self.bound + rest - self._messages[0][edge])[:, None]
        return pair_bounds

    def _visits(self, forward: bool) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield (node, edges to visited nodes, edges to unvisited nodes) in the order of the
        sweep.
        """
        if forward:
            yield from zip(range(len(self._costs)), self._into, self._out, strict=True)
        else:
            yield from zip(
                reversed(range(len(self._costs))), self._out[::-1], self._into[::-1], strict=True
            )

    def _visit(self, node: int, visited: list[int], unvisited: list[int], forward: bool) -> Array:
        """Perform the three steps of a sweep (see `Dual`) for one node, whose edges to nodes that
        the sweep has and has not visited are given. Return the rest r of step 2.
        """
        collected = self._messages[forward]
        distributed = self._messages[not forward]
        for edge in visited:
            collected[edge] = minimum_difference(
                self._matrices[edge], distributed[edge], 0 if forward else 1
            )
        rest = self._extract_minimum(node)
        np.maximum(
            self.configuration_bounds[node], rest + self.bound, out=self.configuration_bounds[node]
        )
        for edge in unvisited:
            distributed[edge] -= rest / max(len(unvisited), len(visited))
        return rest

    def copy(self) -> Dual:
        """Return a copy. Changes of the copy do not change this dual, and vice versa."""
        other = copy.copy(self)
        other._matrices = list(self._matrices)
        other._costs, other.configuration_bounds, *messages = (
            [vector.copy() for vector in vectors]
            for vectors in (self._costs, self.configuration_bounds, *self._messages)
        )
        other._messages = messages[0], messages[1]
        return other

    def restrict(self, kept: Sequence[Array]) -> None:
        """Restrict each node to some of its present configurations. `kept` contains their indices
        per node, ascending.
        """
        changed = [len(keep) < len(costs) for keep, costs in zip(kept, self._costs, strict=True)]
        for node, keep in enumerate(kept):
            if changed[node]:
                self._costs[node] = self._costs[node][keep]
                self.configuration_bounds[node] = self.configuration_bounds[node][keep]
        for edge, ends in enumerate(self._ends):
            if changed[ends[0]] or changed[ends[1]]:
                self._matrices[edge] = (
                    self._matrices[edge].take(kept[ends[0]], 0).take(kept[ends[1]], 1)
                )
                for messages, end in zip(self._messages, ends, strict=True):
                    messages[edge] = messages[edge][kept[end]]

    def _extract_minimum(self, node: int) -> Array:
        """Perform step 2 of a sweep (see `Dual`) for one node: move the minimum of its costs to
        `bound`. Return the rest r, one value per configuration.
        """
        total = self._costs[node].copy()
        for edge in self._out[node]:
            total += self._messages[0][edge]
        for edge in self._into[node]:
            total += self._messages[1][edge]
        minimum = np.minimum.reduce(total)
        total -= minimum
        self._costs[node] -= minimum
        self.bound += float(minimum)
        return total


def minimum_difference(matrix: Array, vector: Array, axis: int) -> Array:
    """Return the minimum along `axis` of `matrix - vector`. `vector` has one entry per index of
    axis `axis` of the matrix, and is subtracted along it. The difference is formed in blocks that
    fit in the CPU cache.
    """
    if matrix.size <= BLOCK_ENTRIES:
        difference = matrix - (vector if axis == 1 else vector[:, None])
        minimum_of_all: Array = np.minimum.reduce(difference, axis=axis)
        return minimum_of_all
    if axis == 1:
        minimum = np.empty(matrix.shape[0])
        for rows in index_blocks(matrix.shape[0], matrix.shape[1]):
            (matrix[rows] - vector).min(axis=1, out=minimum[rows])
        return minimum
    minimum = np.full(matrix.shape[1], np.inf)
    for rows in index_blocks(matrix.shape[0], matrix.shape[1]):
        np.minimum(minimum, (matrix[rows] - vector[rows, None]).min(axis=0), out=minimum)
    return minimum


class Subproblem:
    """A part of the search: a model with only some configurations of each node, and the dual (lower
    bounds) of this restricted model. The model has at most one edge between two nodes.
    """

    kept: KeptConfigurations
    """The configurations of each node that are in the part."""

    def __init__(self, model: MinSum, kept: KeptConfigurations) -> None:
        """Make a part of `model` with the configurations `kept`. Of these, configurations are
        omitted that have no allowed pair with a configuration of some neighbour. Raise
        InfeasibleError if a node has none left.
        """
        self._support = AllowedConfigurations(model)
        self.kept = self._support.allowed_in(kept)
        self.around = neighbours(model)
        self.dual = Dual(restrict(model, self.kept))

    @property
    def bound(self) -> float:
        """Lower bound of the cost of all choices in the part."""
        return (
            max(
                self.dual.bound,
                *(
                    float(configuration_bounds.min())
                    for configuration_bounds in self.dual.configuration_bounds
                ),
            )
            - self.dual.rounding
        )

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """Improve the lower bounds of the part by one sweep over its nodes, in ascending order if
        `forward`, otherwise in descending order. Return the choice that the sweep found.
        """
        return configurations_at(self.kept, self.dual.sweep(forward))

    def within(self, threshold: float) -> list[Array]:
        """Return, per node, the positions of the configurations whose lower bound is at most
        `threshold`.
        """
        return [
            np.flatnonzero(configuration_bounds <= threshold + self.dual.rounding)
            for configuration_bounds in self.dual.configuration_bounds
        ]

    def at(self, positions: KeptConfigurations) -> list[Array]:
        """Return, per node, the configurations at these positions of `kept`."""
        return [keep[places] for keep, places in zip(self.kept, positions, strict=True)]

    def drop_above(self, threshold: float) -> None:
        """Drop configurations whose lower bound exceeds `threshold`, if this more than halves the
        work of a sweep. Raise InfeasibleError if the bounds of all configurations of a node exceed
        the threshold.
        """
        positions = self.within(threshold)
        sizes = [len(of_node) for of_node in positions]
        if not all(sizes):
            raise InfeasibleError(f"every solution costs more than {threshold}")
        if 2 * self.dual.cells(sizes) < self.dual.cells([len(keep) for keep in self.kept]):
            self._restrict_to(positions)

    def _restrict_to(self, positions: KeptConfigurations) -> None:
        """Restrict the part to the configurations at `positions` of `kept`, and drop configurations
        that have no allowed pair with some neighbour. Raise InfeasibleError if a node has no
        configuration left.
        """
        kept = self._support.allowed_in(self.at(positions))
        self.dual.restrict(
            [np.searchsorted(old, new) for old, new in zip(self.kept, kept, strict=True)]
        )
        self.kept = kept

    def subset(self, positions: KeptConfigurations) -> Subproblem:
        """Return a new part with the configurations at `positions` of `kept`. Raise InfeasibleError
        if a node has no configuration left.
        """
        part = copy.copy(self)
        part.dual = self.dual.copy()
        part._restrict_to(positions)
        return part

    def split(self) -> list[Subproblem]:
        """Return up to two parts that divide this part at one node: one part has the half of the
        node's configurations with the lower bounds, the other part has the other half. A part
        without an allowed choice is omitted.

        A node with many configurations and many undecided neighbours is preferred. A node is
        undecided if it has more than one configuration. Without undecided nodes the result is
        empty; a sweep has then found the only choice.
        """
        open_nodes = {node for node, keep in enumerate(self.kept) if len(keep) > 1}
        if not open_nodes:
            return []
        node = max(
            open_nodes,
            key=lambda n: len(self.kept[n]) ** 0.5 * (1 + len(self.around[n] & open_nodes)),
        )
        cheapest = np.argsort(self.dual.configuration_bounds[node], kind="stable")
        parts = []
        for positions_of_node in np.split(cheapest, [len(cheapest) // 2]):
            positions = [np.arange(len(keep)) for keep in self.kept]
            positions[node] = np.sort(positions_of_node)
            with suppress(InfeasibleError):
                parts.append(self.subset(positions))
        return parts


GAP_FRACTIONS = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Thresholds for elimination, as fractions of the gap between lower bound and best cost, in the
order in which they are tried. The first threshold whose work is allowed is used.
"""


class Incumbent:
    """The best known choice of a model, among the choices whose memory is at most `limit` bytes."""

    def __init__(self, model: MinSum, limit: Number = math.inf, bound: float = -math.inf) -> None:
        self.model = model
        self.limit = limit
        self.bound = bound
        self.choice: tuple[int, ...] = ()
        """The best known choice; () if there is none."""
        self.cost: Number = math.inf
        self.memory: Number = 0
        """Bytes of the best known choice; 0 if there is no memory limit."""

    def offer(self, choice: Sequence[int]) -> None:
        """Store `choice` if it fits in memory and costs less than the stored choice."""
        cost = self.model.cost_of(choice)
        if self.choice and cost >= self.cost:
            return
        memory = 0 if self.limit == math.inf else self.model.memory_of(choice)
        if memory <= self.limit:
            self.choice = tuple(choice)
            self.cost = cost
            self.memory = memory


class Objective(Incumbent):
    """Goal of a search without a memory limit: the choice with the minimum cost in a model with at
    most one edge between two nodes, and the best choice known so far. `bound` is a lower bound of
    all choices in the model that is searched.
    """

    @property
    def cutoff(self) -> float:
        """The best known cost, in the model that is searched. A part whose bound reaches it
        contains no better choice.
        """
        return float(self.cost)

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """Solve the part, restricted to configurations with bounds up to a threshold, by
        elimination, and offer the result as best choice. Return (bound, work).

        bound: a lower bound of all choices in the part that are better than the best known choice.
        work: the work that was done, in sums; 0 if no threshold was possible.

        `low` is a known lower bound of the part. The threshold is low + fraction * (top - low) for
        the first of `GAP_FRACTIONS` whose elimination needs at most `work` sums. `top` is the best
        known cost, or the largest configuration bound if this is smaller.

        Each choice that is not in the restricted part contains a configuration above the threshold.
        So after the elimination, all better choices cost at least the threshold. For fraction 1, no
        better choice can contain a configuration above the threshold, so the bound is the cutoff.
        """
        top = min(
            self.cutoff,
            max(float(bounds.max()) for bounds in part.dual.configuration_bounds),
        )
        for fraction in GAP_FRACTIONS:
            threshold = low + fraction * (top - low)
            positions = part.within(threshold)
            sizes = [len(of_node) for of_node in positions]
            around = undecided_graph(part.around, sizes)
            order = smallest_table_order(around, sizes)
            entries, needed = elimination_size(around, sizes, order)
            if needed <= work and 8 * entries <= MAX_BYTES:
                kept = part.at(positions)
                with suppress(InfeasibleError):
                    found = eliminate_in_order(
                        absorb_fixed_nodes(restrict(self.model, kept)), order
                    )
                    self.offer(configurations_at(kept, found.choice))
                return self.cutoff if fraction == 1.0 else min(threshold, self.cutoff), needed
        return low, 0.0


MIN_PROGRESS = 0.1
"""Minimum fraction of the gap that a forward and a backward sweep must close. Otherwise the sweeps
of a part end.
"""
STALLED_WORK_FACTOR = 50
"""Maximum work of the last elimination before a part is split, as a multiple of the work of the
part's sweeps.
"""
ALWAYS_ALLOWED_WORK = 1e5
"""Work of an elimination, in sums, that is allowed even if the budget is smaller."""


def search(root: Subproblem, goal: Objective, budget: Budget) -> float:
    """Search for the goal's best choice in the part `root`, and store it in `goal`. Return a lower
    bound, in the model that is searched, of all choices that are better than the stored choice. If
    the bound reaches the goal's cutoff (without a memory limit, the best known cost), the stored
    choice is optimal. If the budget ends first, the bound can be lower than the cutoff.
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
        for child in part.split():
            created += 1
            heappush(parts, (max(bound, child.bound), created, child))
    return min(parts[0][0], goal.cutoff) if parts else goal.cutoff


def _refine(part: Subproblem, bound: float, goal: Objective, budget: Budget) -> float:
    """Improve the goal's choice and the lower bound `bound` of a part by sweeps and eliminations.
    Stop if the sweeps make too little progress, if no better choice remains, or if the budget ends.
    Return the improved bound. It is the goal's cutoff (without a memory limit, the best known cost)
    if the part contains no better choice.
    """
    work = 0.0
    before = -math.inf
    while True:
        for forward in (True, False):
            goal.offer(part.sweep(forward))
            work += part.dual.work
            budget.spend(part.dual.work)
        try:
            part.drop_above(goal.cutoff)
        except InfeasibleError:
            return goal.cutoff
        stalled = part.bound - before < MIN_PROGRESS * (goal.cutoff - before)
        before = part.bound
        bound = max(bound, part.bound)
        if bound < goal.cutoff:
            allowed = max(
                ALWAYS_ALLOWED_WORK,
                min(budget.left, work * (STALLED_WORK_FACTOR if stalled else 1)),
            )
            bound, done_work = goal.eliminate(part, bound, allowed)
            budget.spend(done_work)
        if stalled or bound >= goal.cutoff or not budget.left:
            return bound


class ReducedStart:
    """The first part of a search: a model from which nodes with at most two neighbours were
    eliminated (`reduce_model`).
    """

    def __init__(self, model: MinSum, budget: Budget) -> None:
        """Reduce the model, with work from `budget`. Raise InfeasibleError if a node of the reduced
        model has no allowed configuration.
        """
        self._model = model
        self.reduction = reduce_model(model, sum(edge.costs.size for edge in model.edges))
        budget.spend(self.reduction.work)
        self.part = Subproblem(self.reduction.model, all_configurations(self.reduction.model))

    def solve(self, budget: Budget) -> Assignment:
        """Return the cheapest choice of the original model without a memory limit. If the budget
        ends first, return the best choice found with a lower bound; its cost is inf if each choice
        that was found is forbidden. Raise InfeasibleError if every choice is forbidden.
        """
        goal = Objective(self.reduction.model)
        bound = search(self.part, goal, budget)
        proven = bound >= goal.cutoff
        if proven and math.isinf(goal.cost):
            raise all_forbidden_error()
        choice = self.reduction.expand_choice(goal.choice)
        cost = self._model.cost_of(choice)
        return Assignment(
            choice, cost, reported_bound(bound, cost, proven), proven, self._model.memory_of(choice)
        )
