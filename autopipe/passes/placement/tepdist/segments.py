"""The three levels of TePDist's search for splits, on a model whose edges lead from operands to
users: cones of operators around a root, segments of cones between critical nodes, and the path
through all segments (TePDist, "SPMD Strategy").
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
from autopipe.passes.placement.tepdist.integer_programs import least_by_program
from autopipe.passes.solvers.min_sum import Edge, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Subproblem
from autopipe.passes.solvers.min_sum.elimination import Contraction, neighbours
from autopipe.passes.solvers.min_sum.model import (
    Array,
    Once,
    blocks,
    conditioned,
    everything,
    merged,
    restricted,
)


def is_root(model: MinSum) -> Array:
    """True if a variable is the root of a cone, of [variables]. Roots are operators with several
    users or none, of several operands, and heavy ones, which take more than all do on average; so
    is a value that several operators read. All others have one operand at most and one user:
    together with the operand's root they are a line. (TePDist, "SPMD Strategy: Cone Structure".)
    """
    users, operands = (np.zeros(len(model.costs), dtype=np.int64) for _ in range(2))
    for edge in model.edges:
        users[edge.source] += 1
        operands[edge.target] += 1
    least = np.array([costs.min() for costs in model.costs], dtype=float)
    roots: Array = (users != 1) | (operands > 1) | (least > least.mean())
    return roots


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Cost of choices, and the bytes that they need."""

    costs: Array
    memory: Array

    def turned(self) -> Sums:
        """The same with both axes exchanged."""
        return Sums(self.costs.T, self.memory.T)

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.costs + other.costs, self.memory + other.memory)


@dataclass(frozen=True, slots=True, eq=False)
class FilledVariable:
    """A non-root, its one or two neighbours, and its best configuration for each of theirs, an axis
    a neighbour.
    """

    variable: int
    ends: tuple[int, ...]
    best: Array


@dataclass(frozen=True, slots=True, eq=False)
class Cones:
    """A model of roots alone; without a price for memory its least cost is that of the whole."""

    model: MinSum
    roots: tuple[int, ...]  # Of the model's variables: those that they were.
    filled: tuple[FilledVariable, ...] = ()

    def expanded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice for all variables that goes with one for the roots."""
        best = dict(zip(self.roots, choice, strict=True))
        for each in reversed(self.filled):
            best[each.variable] = int(each.best[tuple(best[end] for end in each.ends)])
        return tuple(best[variable] for variable in range(len(best)))


def unfilled(model: MinSum, _rate: float = 0.0) -> Cones:
    """Every variable as a root."""
    return Cones(merged(model), tuple(range(len(model.costs))))


def fill_cones(model: MinSum, rate: float = 0.0) -> Cones:
    """`model` with its cones filled so that cost, and `rate` for each byte, are least. A cone's
    non-roots are filled for each strategy of its root and of the root that it reads from. With one
    filling for each strategy of its own root alone a cone could not go along with what its operand
    offers; with one for both ends, a choice for the roots costs what the best choice for everything
    around it does.
    """
    once = Once()
    simple = merged(model)

    def sums(costs: Array, memory: Array | None) -> Sums:
        return Sums(costs, np.zeros(costs.shape, np.int64) if memory is None else memory)

    left = Contraction(
        [once(sums, *each) for each in zip(simple.costs, simple.node_memory, strict=True)],
        [(edge.source, edge.target, once(sums, edge.costs, edge.memory)) for edge in simple.edges],
        partial(once, Sums.turned),
        partial(once, Sums.__add__),
    )
    filling = partial(_filling, rate)
    filled = []
    for variable in np.flatnonzero(~is_root(model)).tolist():
        if left.around[variable]:
            least, best = once(filling, *left.tables(variable))
            filled.append(FilledVariable(variable, left.take(variable, least), best))
    roots, edges = left.left()
    own = left.own.values()
    made = MinSum(
        tuple(each.costs for each in own),
        tuple(Edge(one, other, each.costs, each.memory) for one, other, each in edges),
        tuple(each.memory for each in own),
    )
    return Cones(made, roots, tuple(filled))


def _filling(rate: float, own: Sums, *ends: Sums) -> tuple[Sums, Array]:
    """Of a variable's own sums and those with its one or two ends the least, and which
    configuration that is.
    """
    nothing = Sums(np.zeros((len(own.costs), 1)), np.zeros((len(own.costs), 1), np.int64))
    first, second = (*ends, nothing)[:2]
    best = np.empty((first.costs.shape[1], second.costs.shape[1]), np.int64)
    behind = Sums(own.costs[:, None] + second.costs, own.memory[:, None] + second.memory)
    priced = behind.costs + rate * behind.memory
    front = first.costs + rate * first.memory
    for rows in blocks(len(best), priced.size):
        best[rows] = (front[:, rows].T[:, :, None] + priced[None]).argmin(axis=1)
    which, columns = np.ogrid[: best.shape[0], : best.shape[1]]
    costs = first.costs.T[which, best] + behind.costs[best, columns]
    memory = first.memory.T[which, best] + behind.memory[best, columns]
    if len(ends) == 1:
        return Sums(costs[:, 0], memory[:, 0]), best[:, 0]
    return Sums(costs, memory), best


def ranks(model: MinSum) -> Array:
    """As soon as possible: how many others at most come before a variable on a way to it, of
    [variables].
    """
    users: list[list[int]] = [[] for _ in model.costs]
    operands = np.zeros(len(model.costs), dtype=np.int64)
    for edge in model.edges:
        users[edge.source].append(edge.target)
        operands[edge.target] += 1
    found = np.zeros_like(operands)
    ready = np.flatnonzero(operands == 0).tolist()
    for source in ready:  # It grows on the way.
        for user in users[source]:
            found[user] = max(found[user], found[source] + 1)
            operands[user] -= 1
            if operands[user] == 0:
                ready.append(user)
    return found


MOST_WIDE = 6  # Wide variables at most.
SMALL = 10  # Variables of a segment for which nothing needs to be wide.


@dataclass(frozen=True, slots=True)
class Segment:
    """Variables between critical nodes."""

    ends: tuple[int, ...]
    """Places, among the critical nodes, of those that it has edges with: none, one, or two that
    follow each other.
    """
    inner: tuple[int, ...]  # Ascending; none where two critical nodes share an edge.


@dataclass(frozen=True, slots=True)
class SegmentedModel:
    """A model's variables, each of them wide, critical (from the first to the last) or inside of a
    segment.
    """

    wide: tuple[int, ...]
    critical: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def largest(self) -> int:
        """Variables of the largest segment, or as many as are no trouble."""
        return max(SMALL, *(len(segment.inner) for segment in self.segments), 0)


def cut(model: MinSum, rank: Array) -> SegmentedModel:
    """The cut with small segments; of such the one with fewest wide variables. Edges lead from
    lower to higher `rank`. A mask or a tied table is read in every layer: no node parts the graph
    as long as it is there. Such wide variables are given before segments are searched
    (`levels.by_segments`), so that nothing that leads past a critical node is left out.
    """
    parter = _Cutter(model, rank)
    widest = parter.widest()
    best = min(
        (parter.cut(widest[:count]) for count in range(len(widest) + 1)), key=attrgetter("largest")
    )
    for variable in best.wide:
        fewer = parter.cut(tuple(other for other in best.wide if other != variable))
        best = min(fewer, best, key=attrgetter("largest"))
    return best


class _Cutter:
    """Cuts of one model without some variables."""

    def __init__(self, model: MinSum, rank: Array) -> None:
        self.around = neighbours(model)
        self.rank = rank.tolist()
        self.order: list[int] = np.argsort(rank, kind="stable").tolist()  # From low to high rank.
        self.behind = [
            sorted(other for other in near if self.rank[other] < own)
            for near, own in zip(self.around, self.rank, strict=True)
        ]
        """Of every variable: its neighbours of lower rank, ascending."""
        least = [float(costs.min()) for costs in model.costs]
        self.weight = [
            seconds if math.isfinite(seconds) else 0.0 for seconds in least
        ]  # Seconds of each at least.

    def widest(self) -> tuple[int, ...]:
        """Values that reach farthest, all their neighbours taken together, one after the other. A
        value that reads one of them far away reaches as far through it alone, and no more once it
        is wide.
        """
        far = [
            sum(abs(self.rank[other] - self.rank[own]) for other in near)
            for own, near in enumerate(self.around)
        ]
        found: dict[int, None] = {}
        while len(found) < min(MOST_WIDE, len(self.around)):
            variable = max(range(len(far)), key=lambda own: (own not in found, far[own]))
            found[variable] = None
            for other in self.around[variable]:
                far[other] -= abs(self.rank[other] - self.rank[variable])
        return tuple(found)

    def cut(self, wide: tuple[int, ...]) -> SegmentedModel:
        """The critical nodes without some variables, and the segments between them."""
        without = set(wide)
        if len(without) == len(self.around):
            return SegmentedModel(wide, (), ())
        critical = self.critical_nodes(self.heaviest_path(without), without)
        place = {variable: number for number, variable in enumerate(critical)}
        segments = [
            Segment((number, number + 1), ())
            for number, (one, other) in enumerate(pairwise(critical))
            if other in self.around[one]
        ]
        for inner in self.parts(without | place.keys()):
            ends = {
                place[other]
                for variable in inner
                for other in self.around[variable]
                if other in place
            }
            segments.append(Segment(tuple(sorted(ends)), inner))
        return SegmentedModel(wide, critical, tuple(segments))

    def heaviest_path(self, without: Set[int]) -> list[int]:
        """The variables that take most together of any way from low to high rank, none of them in
        `without`.
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
        """Of the heaviest path's variables those that no way leads past but through `without`. On
        the heaviest path a node has no freedom: its rank is the same as soon and as late as
        possible. Where another way leads past it, as a residual does past a product, what is before
        and behind it would still know of one another; so only those are critical that part the
        graph.
        """
        around = self.around
        place = {variable: number for number, variable in enumerate(path)}
        # Places of the path that are joined by one edge, or by variables beside it.
        ways = [
            {place[one], place[other]} for one in place for other in around[one] if other in place
        ]
        for part in self.parts(place.keys() | without):
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

    def parts(self, without: Set[int]) -> list[tuple[int, ...]]:
        """The connected parts of what is left of the graph without some variables, each
        ascending.
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


ROUNDS = 5  # Sweeps forth and back for bounds.
MOST_PAIRS = 20_000  # Of configurations on edges: what a segment's integer program may have.
Ends = tuple[
    int, ...
]  # A strategy for each of a segment's ends: none, its head's, or its head's and its tail's.


class Pairs:
    """A segment as a merged model of its own: its inner variables first, then its ends, which cost
    nothing here. Not every pair of strategies of its ends is solved: all begin with bounds, and the
    dynamic programming settles those on its best path by an integer program over the segment's
    cones. `costs`, `bounds` and `settled` have an axis for each end: what the best inside that is
    known costs where that is settled, else a bound; below which nothing costs; and whether it is
    settled, as what has no inside is.
    """

    def __init__(self, model: MinSum, inner: int) -> None:
        self.model = model
        self.inner = inner
        self.choices: dict[
            Ends, tuple[int, ...]
        ] = {}  # The best inside, where there is one and it is settled.
        self.headed: set[int] = (
            set()
        )  # Strategies of the head of which there are bounds of their own.
        if inner:
            self.bounds = _bounds(model, inner)
            self.costs = self.bounds.copy()
            self.settled = np.asarray(np.isinf(self.bounds))
        else:
            # Ends of one strategy have no edges.
            self.costs = (
                model.edges[0].costs if model.edges else np.zeros([len(end) for end in model.costs])
            )
            self.bounds, self.settled = self.costs, np.ones(self.costs.shape, dtype=bool)

    def approach(self, ends: Ends, seconds: float, solver: str) -> None:
        """Come closer to what the inside costs: by bounds for the head's strategy and all of the
        tail's, and then by the integer program for one strategy of each end.
        """
        if len(ends) == 2 and ends[0] not in self.headed:
            head = ends[0]
            self.headed.add(head)
            bounds = np.maximum(self.bounds[head], _bounds(self._given((head,)), self.inner)[0])
            self.bounds[head] = bounds
            self.costs[head] = np.where(self.settled[head], self.costs[head], bounds)
            self.settled[head] |= np.isinf(bounds)
            return
        self.settled[ends] = True
        try:
            found = least_by_program(self._given(ends), seconds, MOST_PAIRS, solver)
        except InfeasibleError:
            self.costs[ends] = self.bounds[ends] = np.inf
        else:
            self.costs[ends] = found.cost
            self.bounds[ends] = max(self.bounds[ends], found.bound)
            self.choices[ends] = found.choice[: self.inner]

    def _given(self, ends: Ends) -> MinSum:
        """The model with one strategy for the first ends."""
        kept = everything(self.model)
        for place, number in enumerate(ends, self.inner):
            kept[place] = np.array([number])
        return conditioned(restricted(self.model, kept))


def _bounds(model: MinSum, inner: int) -> Array:
    """For each strategy of the ends what the inside costs at least, an axis for each end."""
    ends = list(range(inner, len(model.costs)))
    shape = tuple(len(model.costs[end]) for end in ends)
    found = np.full(shape, np.inf)
    if len(ends) == 2:
        # What the dual knows of both ends together gathers on an edge between them.
        model = MinSum(model.costs, (*model.edges, Edge(ends[0], ends[1], np.zeros(shape))))
    try:
        part = Subproblem(model, everything(model))
    except InfeasibleError:
        return found
    for _ in range(ROUNDS):
        part.dual.tighten()
    if len(ends) == 2:
        reach = part.dual.pairs()[-1]
    else:
        reach = part.dual.reach[ends[0]] if ends else np.array(part.dual.bound)
    found[np.ix_(*(part.kept[end] for end in ends))] = reach - part.dual.rounding
    return found


@dataclass(frozen=True, slots=True)
class Path:
    """A strategy for each critical node."""

    strategies: tuple[int, ...]
    cost: float  # Of nodes and segments, the wide variables' left out.
    bound: float  # No path costs less.
    settled: bool  # True if the integer programs on it are solved: else the cost is a bound, too.


def shortest(
    model: MinSum,
    cut: SegmentedModel,
    pairs: Sequence[Pairs],
    seconds: float,
    known: float,
    end: float | None,
    solver: str,
) -> Path:
    """The path that costs least, where that is less than `known`; what is found by `end` of the
    clock otherwise. Dynamic programming over segments by the strategies of the critical nodes that
    they share. Segments on the best path are settled until all of them are: then no other can cost
    less, as what is not settled stands with its bound.
    """
    own = [model.costs[variable] for variable in cut.critical]
    while True:
        strategies, cost = _path_least(own, cut, [each.costs for each in pairs])
        ends = [tuple(strategies[place] for place in segment.ends) for segment in cut.segments]
        left = {
            (id(each), at): each
            for each, at in zip(pairs, ends, strict=True)
            if not each.settled[at]
        }
        if not left or cost >= known or is_over(end):
            _, bound = _path_least(own, cut, [each.bounds for each in pairs])
            return Path(strategies, cost, bound, not left)
        for (_, at), each in left.items():
            each.approach(at, seconds, solver)


def is_over(end: float | None) -> bool:
    """True if the clock has come to `end`."""
    return end is not None and time.monotonic() >= end


def choice_of(
    path: Path, cut: SegmentedModel, pairs: Sequence[Pairs], wide: Sequence[int]
) -> tuple[int, ...]:
    """The choice for all variables that goes with a settled path."""
    chosen = dict(zip(cut.wide, wide, strict=True)) | dict(
        zip(cut.critical, path.strategies, strict=True)
    )
    for segment, each in zip(cut.segments, pairs, strict=True):
        ends = tuple(path.strategies[place] for place in segment.ends)
        chosen.update(zip(segment.inner, each.choices.get(ends, ()), strict=True))
    return tuple(chosen[variable] for variable in range(len(chosen)))


def _path_least(
    own: Sequence[Array], cut: SegmentedModel, tables: Sequence[Array]
) -> tuple[tuple[int, ...], float]:
    """The strategies that cost least by the tables of all segments, and what they cost."""
    alone = [costs.astype(float) for costs in own]
    between: dict[int, Array] = {}
    constant = 0.0
    for segment, table in zip(cut.segments, tables, strict=True):
        match segment.ends:
            case ():
                constant += float(table)
            case (one,):
                alone[one] += table
            case (one, _):
                between[one] = between[one] + table if one in between else table
    if not own:
        return (), constant
    reached = alone[0]
    came_from: list[Array] = []
    for place, costs in enumerate(alone[1:]):
        through = reached[:, None] + between.get(place, 0.0)
        came_from.append(np.broadcast_to(through.argmin(axis=0), costs.shape))
        reached = through.min(axis=0) + costs
    strategies = [int(reached.argmin())]
    for sources in reversed(came_from):
        strategies.append(int(sources[strategies[-1]]))
    return tuple(reversed(strategies)), constant + float(reached.min())


class EqualSegments:
    """Segments by what they are made of: equal layers have the same arrays, and pairs settled once
    for all of them.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Pairs] = {}  # By where their arrays lie, all of which they hold.

    def pairs(self, model: MinSum, cut: SegmentedModel) -> list[Pairs]:
        """Pairs of each segment of a merged model, whose wide variables have no edges."""
        around: list[list[Edge]] = [[] for _ in model.costs]
        for edge in model.edges:
            around[edge.source].append(edge)
            around[edge.target].append(edge)
        return [self._pairs(model, around, segment, cut) for segment in cut.segments]

    def _pairs(
        self, model: MinSum, around: Sequence[Sequence[Edge]], segment: Segment, cut: SegmentedModel
    ) -> Pairs:
        ends = [cut.critical[place] for place in segment.ends]
        own = [model.costs[variable] for variable in segment.inner]
        free = [len(model.costs[end]) for end in ends]
        place = {variable: number for number, variable in enumerate((*segment.inner, *ends))}
        # The edges of the inner variables; without any the one between the two ends.
        edges = {
            (place[edge.source], place[edge.target]): edge.costs
            for variable in list(place)[: len(own) or 1]
            for edge in around[variable]
            if edge.source in place and edge.target in place
        }
        joined = sorted(edges.items(), key=lambda item: item[0])
        key = (*map(id, own), *free, *((*both, id(costs)) for both, costs in joined))
        if key not in self.known:
            forward = (Edge(*both, costs) for both, costs in joined)
            links = tuple(edge if edge.source < edge.target else edge.reversed for edge in forward)
            self.known[key] = Pairs(MinSum((*own, *map(np.zeros, free)), links), len(own))
        return self.known[key]
