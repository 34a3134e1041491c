"""The three levels of TePDist's search for splits ("SPMD Strategy"), on a min-sum model with one
variable per operator. Its edges lead from operands to users.

A strategy is a configuration of a variable. A choice gives each variable one strategy.

1. Cones: a variable of at most mean cost with one user and at most one operand is merged into its
   neighbours: its best strategy is computed for each combination of their strategies.
2. Segments: critical nodes, which are variables that separate the graph, divide it into segments.
   An integer program solves a segment for given strategies of its ends, the critical nodes next to
   it.
3. The whole graph: dynamic programming over the critical nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.integer_programs import cheapest_by_program
from autopipe.passes.solvers.min_sum import Edge, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Subproblem
from autopipe.passes.solvers.min_sum.elimination import Contraction, neighbours
from autopipe.passes.solvers.min_sum.model import (
    Array,
    ResultCache,
    absorb_fixed_nodes,
    all_configurations,
    index_blocks,
    merge_edges,
    restrict,
)


def cone_roots(model: MinSum) -> Array:
    """Return a boolean array of shape [variables] that is True for the roots of cones ("SPMD
    Strategy: Cone Structure").

    A variable is a root if it has several operands, no user or several users, or if its minimum
    cost is above the mean of all minimum costs. All other variables have at most one operand and
    exactly one user. A cone consists of a root and the variables that reach it without passing
    another root.
    """
    users, operands = (np.zeros(len(model.costs), dtype=np.int64) for _ in range(2))
    for edge in model.edges:
        users[edge.source] += 1
        operands[edge.target] += 1
    minimum_costs = np.array([costs.min() for costs in model.costs], dtype=float)
    roots: Array = (users != 1) | (operands > 1) | (minimum_costs > minimum_costs.mean())
    return roots


@dataclass(frozen=True, slots=True, eq=False)
class CostsAndMemory:
    """Costs and memory of choices for some of the variables: two arrays of equal shape."""

    costs: Array
    memory: Array

    def transposed(self) -> CostsAndMemory:
        """Return the costs and memory with both axes exchanged."""
        return CostsAndMemory(self.costs.T, self.memory.T)

    def __add__(self, other: CostsAndMemory) -> CostsAndMemory:
        return CostsAndMemory(self.costs + other.costs, self.memory + other.memory)


@dataclass(frozen=True, slots=True, eq=False)
class FilledVariable:
    """A variable that was merged into its one or two neighbours `ends`. `best` contains its best
    configuration for each combination of their configurations, with one axis per neighbour.
    """

    variable: int
    ends: tuple[int, ...]
    best: Array


@dataclass(frozen=True, slots=True, eq=False)
class Cones:
    """A model that has only the roots of cones (`cone_roots`) as variables. The other variables of
    the full model were merged into their neighbours.

    If no cost per byte was given, its minimum cost equals the minimum cost of the full model.
    """

    model: MinSum
    roots: tuple[int, ...]
    """For each variable of `model`: the number of this variable in the full model."""
    filled: tuple[FilledVariable, ...] = ()

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the choice (one configuration per variable) for the full model that follows from
        `choice`, a choice for the roots.
        """
        best = dict(zip(self.roots, choice, strict=True))
        for each in reversed(self.filled):
            best[each.variable] = int(each.best[tuple(best[end] for end in each.ends)])
        return tuple(best[variable] for variable in range(len(best)))


def merge_without_cones(model: MinSum, _rate: float = 0.0) -> Cones:
    """Return the model with at most one edge between two variables (`merge_edges`), in which no
    variable is merged into its neighbours. The rate is ignored.
    """
    return Cones(merge_edges(model), tuple(range(len(model.costs))))


def fill_cones(model: MinSum, rate: float = 0.0) -> Cones:
    """Return `model` reduced to the roots of its cones (`cone_roots`). The other variables are
    chosen to minimise the cost plus `rate` times the bytes.

    Each variable that is not a root gets its best configuration for each combination of its
    neighbours' configurations. So a choice for the roots costs as much as the best choice for all
    variables that contains it. (If the configuration depended only on the root of the variable's
    own cone, it could not adapt to the strategy of its operand.)
    """
    once = ResultCache()
    simple = merge_edges(model)

    def to_costs_and_memory(costs: Array, memory: Array | None) -> CostsAndMemory:
        """Return costs and memory as sums; the memory is 0 if it is None."""
        return CostsAndMemory(costs, np.zeros(costs.shape, np.int64) if memory is None else memory)

    contraction = Contraction(
        [
            once(to_costs_and_memory, *each)
            for each in zip(simple.costs, simple.node_memory, strict=True)
        ],
        [
            (edge.source, edge.target, once(to_costs_and_memory, edge.costs, edge.memory))
            for edge in simple.edges
        ],
        partial(once, CostsAndMemory.transposed),
        partial(once, CostsAndMemory.__add__),
    )
    filling = partial(_best_fill, rate)
    filled = []
    for variable in np.flatnonzero(~cone_roots(model)).tolist():
        if contraction.neighbours_of[variable]:
            sums_of_best, best = once(filling, *contraction.tables(variable))
            filled.append(
                FilledVariable(variable, contraction.eliminate(variable, sums_of_best), best)
            )
    roots, edges = contraction.remaining()
    root_sums = contraction.node_tables.values()
    root_model = MinSum(
        tuple(each.costs for each in root_sums),
        tuple(Edge(source, target, each.costs, each.memory) for source, target, each in edges),
        tuple(each.memory for each in root_sums),
    )
    return Cones(root_model, roots, tuple(filled))


def _best_fill(
    rate: float, own: CostsAndMemory, *ends: CostsAndMemory
) -> tuple[CostsAndMemory, Array]:
    """Return (sums, best) for a variable with the costs `own` and its one or two neighbours, whose
    edges have the costs `ends`. Both results have one axis per neighbour.

    sums: cost and memory of the variable and its edges with the best configuration of the variable.
    best: the best configuration, which minimises cost plus `rate` times bytes.
    """
    no_neighbour = CostsAndMemory(
        np.zeros((len(own.costs), 1)), np.zeros((len(own.costs), 1), np.int64)
    )
    first, second = (*ends, no_neighbour)[:2]
    best = np.empty((first.costs.shape[1], second.costs.shape[1]), np.int64)
    behind = CostsAndMemory(own.costs[:, None] + second.costs, own.memory[:, None] + second.memory)
    priced = behind.costs + rate * behind.memory
    front = first.costs + rate * first.memory
    for rows in index_blocks(len(best), priced.size):
        best[rows] = (front[:, rows].T[:, :, None] + priced[None]).argmin(axis=1)
    which, columns = np.ogrid[: best.shape[0], : best.shape[1]]
    costs = first.costs.T[which, best] + behind.costs[best, columns]
    memory = first.memory.T[which, best] + behind.memory[best, columns]
    if len(ends) == 1:
        return CostsAndMemory(costs[:, 0], memory[:, 0]), best[:, 0]
    return CostsAndMemory(costs, memory), best


def variable_ranks(model: MinSum) -> Array:
    """Return the rank of each variable, of shape [variables]: the number of edges on the longest
    path that ends at the variable.
    """
    users: list[list[int]] = [[] for _ in model.costs]
    operands = np.zeros(len(model.costs), dtype=np.int64)
    for edge in model.edges:
        users[edge.source].append(edge.target)
        operands[edge.target] += 1
    found = np.zeros_like(operands)
    ready = np.flatnonzero(operands == 0).tolist()
    # The loop appends variables to this list once all their operands have a rank.
    for source in ready:
        for user in users[source]:
            found[user] = max(found[user], found[source] + 1)
            operands[user] -= 1
            if operands[user] == 0:
                ready.append(user)
    return found


MAXIMUM_HIGH_DEGREE = 6
"""Maximum number of high-degree variables, whose strategies are fixed before the segments are
searched.
"""
SMALL = 10
"""Number of variables up to which a segment counts as small. If all segments of two divisions are
small, the division with fewer high-degree variables is preferred.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """A connected set of variables between critical nodes (variables that separate the graph), or
    an edge between two of them.
    """

    ends: tuple[int, ...]
    """Positions, in `SegmentedModel.critical`, of the critical nodes with which the segment has
    edges: none, one, or two consecutive ones.
    """
    inner: tuple[int, ...]
    """The variables of the segment, ascending; () for an edge between two critical nodes."""


@dataclass(frozen=True, slots=True)
class SegmentedModel:
    """A division of a model's variables into high-degree variables (read in many layers), critical
    nodes (variables that separate the remaining graph, in the order of a path), and the segments
    between critical nodes.
    """

    high_degree: tuple[int, ...]
    critical: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def largest(self) -> int:
        """Return the number of variables of the largest segment, or `SMALL` if that is larger."""
        return max(SMALL, *(len(segment.inner) for segment in self.segments), 0)


def divide_into_segments(model: MinSum, rank: Array) -> SegmentedModel:
    """Return the division of the model into segments whose largest segment has the fewest
    variables.

    Critical nodes are variables that separate the graph; segments are the parts between them. Edges
    lead from lower to higher `rank`. Among the divisions that are tried, ties are won by fewer
    high-degree variables.

    A variable that is read in all layers, such as an attention mask or a tied embedding, prevents a
    division. Such high-degree variables are fixed before the segments are searched
    (`levels.solve_by_segments`). Their edges then disappear, so this loses nothing. First, the 0 to
    `MAXIMUM_HIGH_DEGREE` variables whose edges span the most ranks are tried as high-degree
    variables. Then each variable of the best division is dropped again if that does not enlarge the
    largest segment.
    """
    partitioner = _Partitioner(model, rank)
    highest_degree = partitioner.high_degree_candidates()
    best = min(
        (partitioner.divide(highest_degree[:count]) for count in range(len(highest_degree) + 1)),
        key=attrgetter("largest"),
    )
    for variable in best.high_degree:
        fewer = partitioner.divide(tuple(other for other in best.high_degree if other != variable))
        best = min(fewer, best, key=attrgetter("largest"))
    return best


class _Partitioner:
    """Divides one model into critical nodes (variables that separate the graph) and the segments
    between them, for different sets of high-degree variables.
    """

    def __init__(self, model: MinSum, rank: Array) -> None:
        self.around = neighbours(model)
        self.rank = rank.tolist()
        self.order: list[int] = np.argsort(rank, kind="stable").tolist()
        """The variables in ascending order of rank, which is a topological order."""
        self.behind = [
            sorted(other for other in near if self.rank[other] < own)
            for near, own in zip(self.around, self.rank, strict=True)
        ]
        """For each variable: its neighbours that come before it in the graph (have a lower rank),
        ascending.
        """
        minimum_costs = [float(costs.min()) for costs in model.costs]
        self.weight = [seconds if math.isfinite(seconds) else 0.0 for seconds in minimum_costs]
        """For each variable: its minimum cost in seconds; 0 if all its configurations are
        forbidden.
        """

    def high_degree_candidates(self) -> tuple[int, ...]:
        """Return up to `MAXIMUM_HIGH_DEGREE` variables in descending order of reach.

        The reach of a variable is the sum of the rank differences to its neighbours. Once a
        variable is selected, its edges no longer count for its neighbours. The rank of a variable
        is the number of edges on the longest path that ends at it, in the model before operators
        were merged into cones.
        """
        far = [
            sum(abs(self.rank[other] - self.rank[own]) for other in near)
            for own, near in enumerate(self.around)
        ]
        found: dict[int, None] = {}
        while len(found) < min(MAXIMUM_HIGH_DEGREE, len(self.around)):
            variable = max(range(len(far)), key=lambda own: (own not in found, far[own]))
            found[variable] = None
            for other in self.around[variable]:
                far[other] -= abs(self.rank[other] - self.rank[variable])
        return tuple(found)

    def divide(self, high_degree: tuple[int, ...]) -> SegmentedModel:
        """Return the division of the model with the high-degree variables `high_degree`."""
        removed = set(high_degree)
        if len(removed) == len(self.around):
            return SegmentedModel(high_degree, (), ())
        critical = self.critical_nodes(self.heaviest_path(removed), removed)
        critical_index = {variable: number for number, variable in enumerate(critical)}
        segments = [
            Segment((number, number + 1), ())
            for number, (source, neighbour) in enumerate(pairwise(critical))
            if neighbour in self.around[source]
        ]
        for inner in self.connected_parts(removed | critical_index.keys()):
            ends = {
                critical_index[neighbour]
                for variable in inner
                for neighbour in self.around[variable]
                if neighbour in critical_index
            }
            segments.append(Segment(tuple(sorted(ends)), inner))
        return SegmentedModel(high_degree, critical, tuple(segments))

    def heaviest_path(self, without: Set[int]) -> list[int]:
        """Return the path from low to high rank that avoids the variables `without` and has the
        maximum total weight. The weight of a variable is its minimum cost.

        The rank of a variable is the number of edges on the longest path that ends at it, in the
        model before operators were merged into cones.
        """
        total = [
            -math.inf if variable in without else own for variable, own in enumerate(self.weight)
        ]
        before = [-1] * len(total)
        for variable in self.order:
            heaviest = max(self.behind[variable], key=total.__getitem__, default=-1)
            if heaviest >= 0 and variable not in without and total[heaviest] > -math.inf:
                before[variable] = heaviest
                total[variable] += total[heaviest]
        path = [max(range(len(total)), key=total.__getitem__)]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        return path[::-1]

    def critical_nodes(self, path: Sequence[int], without: Set[int]) -> tuple[int, ...]:
        """Return the variables of `path` that separate the graph, after the variables `without`
        were removed.

        On the heaviest path, the earliest rank of each node equals its latest rank. This is not
        sufficient: if another path bypasses the node, as a residual connection bypasses a matmul,
        the parts before and after the node still depend on each other. So only nodes that separate
        the graph are critical.

        Each edge, and each connected part beside the path, that touches the path at indices i < j
        bypasses the nodes i+1 to j-1. A prefix sum over these intervals finds the nodes that are
        not bypassed.
        """
        around = self.around
        place = {variable: number for number, variable in enumerate(path)}
        # For each edge between nodes of the path, and for each connected part beside the path: the
        # indices on the path of the nodes that the edge or part touches.
        ways = [
            {place[one], place[other]} for one in place for other in around[one] if other in place
        ]
        for part in self.connected_parts(place.keys() | without):
            ways.append(
                {place[other] for variable in part for other in around[variable] if other in place}
            )
        jumps = np.zeros(len(path) + 1, dtype=np.int64)
        for ends in filter(None, ways):
            first = min(ends)
            last = max(ends)
            if last > first + 1:
                jumps[first + 1] += 1
                jumps[last] -= 1
        return tuple(
            variable
            for variable, passing in zip(path, np.cumsum(jumps), strict=False)
            if not passing
        )

    def connected_parts(self, without: Set[int]) -> list[tuple[int, ...]]:
        """Return the connected components of the graph without the variables `without`, each in
        ascending order.
        """
        seen = set(without)
        found = []
        for start in range(len(self.around)):
            if start in seen:
                continue
            seen.add(start)
            part = [start]
            for variable in part:
                new = self.around[variable] - seen
                seen |= new
                part += new
            found.append(tuple(sorted(part)))
        return found


ROUNDS = 5
"""Number of forward and backward sweeps over the dual that tighten the lower bounds of a segment.
"""
MAXIMUM_PAIRS = 20_000
"""Maximum number of pairs of configurations in the integer program of a segment."""
Ends = tuple[int, ...]
"""A strategy (configuration) for each end of a segment, which are the critical nodes next to it:
(), (head,) or (head, tail).
"""


class SegmentTable:
    """The costs of a segment for each combination of strategies (configurations) of its ends, the
    critical nodes next to it.

    `model` is a min-sum model with the `inner` variables of the segment first, and then its ends,
    whose own costs are not included. `costs`, `bounds` and `solved` have one axis per end. `bounds`
    contains lower bounds on the cost of the inner variables and all edges. `costs` contains the
    minimum of this cost if the entry of `solved` is True, and otherwise the bound. The dynamic
    programming solves only the entries on its best path (`tighten`).
    """

    def __init__(self, model: MinSum, inner: int) -> None:
        self.model = model
        self.inner = inner
        self.choices: dict[Ends, tuple[int, ...]] = {}
        """The best configurations of the inner variables, for each solved entry that is feasible.
        """
        self.headed: set[int] = set()
        """Strategies (configurations) of the head, the first of two ends. The lower bounds of their
        entries were tightened with the head fixed.
        """
        if inner:
            self.bounds = _inner_bounds(model, inner)
            self.costs = self.bounds.copy()
            self.solved = np.asarray(np.isinf(self.bounds))
        else:
            # If one end of the segment has only one strategy, the costs of the edge between the
            # ends were merged into the costs of the other end. No edge remains then, and the table
            # is zero.
            self.costs = (
                model.edges[0].costs if model.edges else np.zeros([len(end) for end in model.costs])
            )
            self.bounds = self.costs
            self.solved = np.ones(self.costs.shape, dtype=bool)

    def tighten(self, ends: Ends, seconds: float, solver: str) -> None:
        """Tighten the entry for `ends`, the strategies (configurations) of the segment's ends.

        If there are two ends, (head, tail), the first call with a strategy of the head tightens the
        lower bounds of all entries with this strategy of the head. Each other call solves an
        integer program for the strategies `ends`, within `seconds`.
        """
        if len(ends) == 2 and ends[0] not in self.headed:
            head = ends[0]
            self.headed.add(head)
            bounds = np.maximum(
                self.bounds[head], _inner_bounds(self._fix_ends((head,)), self.inner)[0]
            )
            self.bounds[head] = bounds
            self.costs[head] = np.where(self.solved[head], self.costs[head], bounds)
            self.solved[head] |= np.isinf(bounds)
            return
        self.solved[ends] = True
        try:
            found = cheapest_by_program(self._fix_ends(ends), seconds, MAXIMUM_PAIRS, solver)
        except InfeasibleError:
            self.costs[ends] = self.bounds[ends] = np.inf
        else:
            self.costs[ends] = found.cost
            self.bounds[ends] = max(self.bounds[ends], found.bound)
            self.choices[ends] = found.choice[: self.inner]

    def _fix_ends(self, ends: Ends) -> MinSum:
        """Return the segment's model with the configurations of its first ends fixed to `ends`."""
        kept = all_configurations(self.model)
        for place, number in enumerate(ends, self.inner):
            kept[place] = np.array([number])
        return absorb_fixed_nodes(restrict(self.model, kept))


def _inner_bounds(model: MinSum, inner: int) -> Array:
    """Return lower bounds on the cost of the `inner` first variables of `model` and all edges, with
    one axis per end (the remaining variables).
    """
    ends = list(range(inner, len(model.costs)))
    shape = tuple(len(model.costs[end]) for end in ends)
    found = np.full(shape, np.inf)
    if len(ends) == 2:
        # The dual bound of a pair of strategies, one per end, is stored at an edge between the two
        # ends. An edge with zero costs is added so that such an edge exists.
        model = MinSum(model.costs, (*model.edges, Edge(ends[0], ends[1], np.zeros(shape))))
    try:
        part = Subproblem(model, all_configurations(model))
    except InfeasibleError:
        return found
    for _ in range(ROUNDS):
        part.dual.tighten()
    if len(ends) == 2:
        reach = part.dual.pair_bounds()[-1]
    else:
        reach = part.dual.configuration_bounds[ends[0]] if ends else np.array(part.dual.bound)
    found[np.ix_(*(part.kept[end] for end in ends))] = reach - part.dual.rounding
    return found


@dataclass(frozen=True, slots=True)
class StrategyPath:
    """A path of the dynamic programming: one strategy (configuration) for each critical node, a
    variable that separates the graph.
    """

    strategies: tuple[int, ...]
    cost: float
    """Cost of the critical nodes and the segments, without the high-degree variables."""
    bound: float
    """A lower bound on the cost of all paths."""
    solved: bool
    """True if the entries of all segment tables on the path are solved. Otherwise `cost` is only a
    lower bound.
    """


def solve_cheapest_path(
    model: MinSum,
    segmented: SegmentedModel,
    pairs: Sequence[SegmentTable],
    seconds: float,
    known: float,
    end: float | None,
    solver: str,
) -> StrategyPath:
    """Return the cheapest path: a strategy (configuration) for each critical node.

    The dynamic programming runs over the critical nodes c = 0, 1, …, and their strategies s. own[c,
    s] is the cost of node c itself, and T[c-1][r, s] the cost of the segments between nodes c-1 and
    c:

        reached[c, s] = own[c, s] + min over r of (reached[c-1, r] + T[c-1][r, s])

    Unsolved entries of T are lower bounds. The entries on the best path are solved, and the best
    path is computed again, until all its entries are solved. Then no other path can be cheaper,
    because the unsolved entries of other paths are lower bounds. `seconds` limits each integer
    program.

    The search ends earlier if the cost reaches `known`, or at time `end`. Then the returned path
    may have unsolved entries, and its bound is a bound on all paths.
    """
    node_costs = [model.costs[variable] for variable in segmented.critical]
    while True:
        strategies, cost = _cheapest_path(node_costs, segmented, [each.costs for each in pairs])
        ends = [
            tuple(strategies[place] for place in segment.ends) for segment in segmented.segments
        ]
        unsolved = {
            (id(each), entry): each
            for each, entry in zip(pairs, ends, strict=True)
            if not each.solved[entry]
        }
        if not unsolved or cost >= known or has_passed(end):
            _, bound = _cheapest_path(node_costs, segmented, [each.bounds for each in pairs])
            return StrategyPath(strategies, cost, bound, not unsolved)
        for (_, entry), each in unsolved.items():
            each.tighten(entry, seconds, solver)


def has_passed(end: float | None) -> bool:
    """True if time `end` (`time.monotonic`) has passed; False if it is None."""
    return end is not None and time.monotonic() >= end


def path_choice(
    path: StrategyPath,
    segmented: SegmentedModel,
    pairs: Sequence[SegmentTable],
    high_degree: Sequence[int],
) -> tuple[int, ...]:
    """Return the choice (one configuration per variable of the model) that belongs to a solved path
    over the critical nodes. `high_degree` contains the configurations of the high-degree variables.
    """
    chosen = dict(zip(segmented.high_degree, high_degree, strict=True)) | dict(
        zip(segmented.critical, path.strategies, strict=True)
    )
    for segment, each in zip(segmented.segments, pairs, strict=True):
        ends = tuple(path.strategies[place] for place in segment.ends)
        chosen.update(zip(segment.inner, each.choices.get(ends, ()), strict=True))
    return tuple(chosen[variable] for variable in range(len(chosen)))


def _cheapest_path(
    node_costs: Sequence[Array], segmented: SegmentedModel, tables: Sequence[Array]
) -> tuple[tuple[int, ...], float]:
    """Return (strategies, cost) of the cheapest path: one strategy (configuration) for each
    critical node. `node_costs` contains the costs of the critical nodes, and `tables` the cost
    table of each segment.
    """
    unary = [costs.astype(float) for costs in node_costs]
    between: dict[int, Array] = {}
    constant = 0.0
    for segment, table in zip(segmented.segments, tables, strict=True):
        match segment.ends:
            case ():
                constant += float(table)
            case (one,):
                unary[one] += table
            case (one, _):
                between[one] = between[one] + table if one in between else table
    if not node_costs:
        return (), constant
    reached = unary[0]
    came_from: list[Array] = []
    for index, costs in enumerate(unary[1:]):
        through = reached[:, None] + between.get(index, 0.0)
        came_from.append(np.broadcast_to(through.argmin(axis=0), costs.shape))
        reached = through.min(axis=0) + costs
    strategies = [int(reached.argmin())]
    for sources in reversed(came_from):
        strategies.append(int(sources[strategies[-1]]))
    return tuple(reversed(strategies)), constant + float(reached.min())


class SegmentCache:
    """Cache of segments by their arrays. Equal layers have identical arrays, so they share one
    `SegmentTable`.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, SegmentTable] = {}
        """Segments by the ids of their arrays. The values keep the arrays alive, so the ids stay
        valid.
        """

    def segment_tables(self, model: MinSum, segmented: SegmentedModel) -> list[SegmentTable]:
        """Return the `SegmentTable` of each segment. `model` must be merged (`merge_edges`), and
        its high-degree variables must have no edges.
        """
        around: list[list[Edge]] = [[] for _ in model.costs]
        for edge in model.edges:
            around[edge.source].append(edge)
            around[edge.target].append(edge)
        return [
            self._segment_table(model, around, segment, segmented) for segment in segmented.segments
        ]

    def _segment_table(
        self,
        model: MinSum,
        around: Sequence[Sequence[Edge]],
        segment: Segment,
        segmented: SegmentedModel,
    ) -> SegmentTable:
        """Return the `SegmentTable` of one segment, from the cache if an equal segment is there.
        `around` contains the edges of each variable.
        """
        ends = [segmented.critical[index] for index in segment.ends]
        inner_costs = [model.costs[variable] for variable in segment.inner]
        end_sizes = [len(model.costs[end]) for end in ends]
        index_of = {variable: number for number, variable in enumerate((*segment.inner, *ends))}
        # The edges of the segment: all edges of its inner variables. For a segment without inner
        # variables, it is the edge between its two ends.
        edges = {
            (index_of[edge.source], index_of[edge.target]): edge.costs
            for variable in list(index_of)[: len(inner_costs) or 1]
            for edge in around[variable]
            if edge.source in index_of and edge.target in index_of
        }
        joined = sorted(edges.items(), key=lambda item: item[0])
        key = (*map(id, inner_costs), *end_sizes, *((*both, id(costs)) for both, costs in joined))
        if key not in self.known:
            forward = (Edge(*both, costs) for both, costs in joined)
            links = tuple(edge if edge.source < edge.target else edge.reversed for edge in forward)
            self.known[key] = SegmentTable(
                MinSum((*inner_costs, *map(np.zeros, end_sizes)), links), len(inner_costs)
            )
        return self.known[key]
