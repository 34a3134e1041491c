"""A model cut into segments at its critical nodes; what reaches across many of them is set apart.

A mask or a tied table is read in every layer: no node parts the graph as long as it is there. Such wide variables are
given before segments are searched (`whole.py`), so that nothing that leads past a critical node is left out.

Cones filled: for each strategy of a root, and of the root that it reads from, the best of what lies between them.

With one filling for each strategy of a root alone, a cone could not go along with what its operand offers; with one for
both ends, a choice for the roots costs what the best choice for everything around it does.

Critical nodes: variables of the heaviest path through which every other way leads, too.

On the heaviest path a node has no freedom: its rank is the same as soon and as late as possible. Where another way
leads past it, as a residual does past a product, what is before and behind it would still know of one another; so only
those are critical that part the graph.

Cost of a segment for each pair of strategies of its head and its tail: an integer program over its cones a pair.

Not every pair is solved: all begin with bounds, and the dynamic programming settles those on its best path. Equal
segments are one object, so that a pair settled for one is settled for all.

The whole graph: dynamic programming over segments by the strategies of the critical nodes that they share.

Segments that are equal are one: their pairs of strategies are solved once for all of them.

Cones: a root, and the non-roots whose results only it and they read.

Roots are operators with several users, tails, operators of several operands, and heavy computation; so is a value that
several operators read. All others have one operand at most and one user: together with the operand's root they are a
line. (TePDist, "SPMD Strategy: Cone Structure".)
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.integer_programs import Programs, least_by_program
from autopipe.passes.solvers.min_sum import Edge, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Subproblem
from autopipe.passes.solvers.min_sum.elimination import Neighbours, neighbours
from autopipe.passes.solvers.min_sum.model import Array, blocks, conditioned, everything, merged, restricted


def least_costs(model: MinSum) -> Array:
    """Least cost of each variable; inf where every configuration is forbidden."""
    known = {id(costs): float(costs.min()) for costs in model.costs}
    return np.array([known[id(costs)] for costs in model.costs])


def is_heavy(model: MinSum) -> Array:
    """True if a variable takes more than all of them do on average, of [variables]."""
    least = least_costs(model)
    heavy: Array = least > least.mean()
    return heavy


def is_root(model: MinSum) -> Array:
    """True if a variable is the root of a cone, of [variables]. Edges lead from operands to users."""
    users, operands = (np.zeros(len(model.costs), dtype=np.int64) for _ in range(2))
    for edge in model.edges:
        users[edge.source] += 1
        operands[edge.target] += 1
    roots: Array = (users != 1) | (operands > 1) | is_heavy(model)
    return roots


def ranks(model: MinSum) -> Array:
    """As soon as possible: how many others at most come before a variable on a way to it, of [variables]."""
    users: list[list[int]] = [[] for _ in model.costs]
    operands = np.zeros(len(model.costs), dtype=np.int64)
    for edge in model.edges:
        users[edge.source].append(edge.target)
        operands[edge.target] += 1
    found = np.zeros_like(operands)
    ready = np.flatnonzero(operands == 0).tolist()
    while ready:
        source = ready.pop()
        for user in users[source]:
            found[user] = max(found[user], found[source] + 1)
            operands[user] -= 1
            if operands[user] == 0:
                ready.append(user)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RankedVariables:
    """A model's variables from low to high rank, and what each takes."""

    order: tuple[int, ...]
    behind: tuple[tuple[int, ...], ...]
    """Of every variable: its neighbours of lower rank, ascending."""
    weight: Array
    """Seconds of each at least."""

    @staticmethod
    def of(model: MinSum, around: Neighbours, rank: Array) -> RankedVariables:
        """The ways of a model whose edges lead from lower to higher `rank`."""
        ranked = rank.tolist()
        behind = (
            sorted(other for other in near if ranked[other] < own) for near, own in zip(around, ranked, strict=True)
        )
        weight = np.where(np.isfinite(least := least_costs(model)), least, 0.0)
        return RankedVariables(tuple(np.argsort(rank, kind="stable").tolist()), tuple(map(tuple, behind)), weight)


def heaviest_path(ways: RankedVariables, without: Set[int]) -> tuple[int, ...]:
    """The variables that take most together of any way from low to high rank, none of them in `without`."""
    total = ways.weight.tolist()
    for variable in without:
        total[variable] = -math.inf
    before = [-1] * len(total)
    for variable in ways.order:
        heaviest, most = -1, -math.inf
        for other in ways.behind[variable]:
            if total[other] > most:
                heaviest, most = other, total[other]
        if heaviest >= 0 and variable not in without:
            before[variable] = heaviest
            total[variable] += most
    path = [max(range(len(total)), key=total.__getitem__)]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path))


def parting(path: Sequence[int], around: Neighbours, without: Set[int]) -> tuple[int, ...]:
    """Of a path's variables those that no way leads past but through `without`."""
    place = {variable: number for number, variable in enumerate(path)}
    jumps = np.zeros(len(path) + 1, dtype=np.int64)
    for ends in _ways(place, around, without):
        first, last = min(ends), max(ends)
        if last > first + 1:
            jumps[first + 1] += 1
            jumps[last] -= 1
    return tuple(variable for variable, passing in zip(path, np.cumsum(jumps), strict=False) if not passing)


def _ways(place: dict[int, int], around: Neighbours, without: Set[int]) -> list[set[int]]:
    """The places of a path that are joined by one edge, or by variables beside it."""
    found = [{place[one], place[other]} for one in place for other in around[one] if other in place]
    for part in parts(around, place.keys() | without):
        ends = {place[other] for variable in part for other in around[variable] if other in place}
        found += [ends] if ends else []
    return found


def parts(around: Neighbours, without: Set[int]) -> list[tuple[int, ...]]:
    """The connected parts of what is left of a graph without some variables, each ascending."""
    seen = set(without)
    found = []
    for start in range(len(around)):
        if start in seen:
            continue
        seen.add(start)
        part = [start]
        for variable in part:
            new = around[variable] - seen
            seen |= new
            part += new
        found.append(tuple(sorted(part)))
    return found


MOST_WIDE = 6
"""Wide variables at most."""
SMALL = 10
"""Variables of a segment for which nothing needs to be wide."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Variables between critical nodes."""

    ends: tuple[int, ...]
    """Places, among the critical nodes, of those that it has edges with: none, one, or two that follow each other."""
    inner: tuple[int, ...]
    """Ascending; none where two critical nodes share an edge."""


@dataclass(frozen=True, slots=True)
class SegmentedModel:
    """A model's variables, each of them wide, critical or inside of a segment."""

    wide: tuple[int, ...]
    critical: tuple[int, ...]
    """From the first to the last."""
    segments: tuple[Segment, ...]


def cut(model: MinSum, rank: Array) -> SegmentedModel:
    """The cut with small segments; of such the one with fewest wide variables.

    Edges lead from lower to higher `rank`.
    """
    around = neighbours(model)
    widest = _widest(around, rank)
    ways = RankedVariables.of(model, around, rank)
    best = min((_cut(ways, around, widest[:count]) for count in range(len(widest) + 1)), key=_largest)
    for variable in best.wide:
        fewer = _cut(ways, around, tuple(other for other in best.wide if other != variable))
        best = min(fewer, best, key=_largest)
    return best


def _widest(around: Neighbours, rank: Array) -> tuple[int, ...]:
    """Values that reach farthest, all their neighbours taken together, one after the other.

    A value that reads one of them far away reaches as far through it alone, and no more once it is wide.
    """
    far = [sum(abs(int(rank[other] - rank[own])) for other in near) for own, near in enumerate(around)]
    found: dict[int, None] = {}
    while len(found) < min(MOST_WIDE, len(around)):
        variable = max(range(len(far)), key=lambda own: (own not in found, far[own]))
        found[variable] = None
        for other in around[variable]:
            far[other] -= abs(int(rank[other] - rank[variable]))
    return tuple(found)


def _largest(found: SegmentedModel) -> int:
    """Variables of the largest segment, or as many as are no trouble."""
    return max(SMALL, *(len(segment.inner) for segment in found.segments), 0)


def _cut(ways: RankedVariables, around: Neighbours, wide: tuple[int, ...]) -> SegmentedModel:
    without = set(wide)
    if len(without) == len(around):
        return SegmentedModel(wide, (), ())
    critical = parting(heaviest_path(ways, without), around, without)
    place = {variable: number for number, variable in enumerate(critical)}
    segments = [
        Segment((number, number + 1), ())
        for number, (one, other) in enumerate(pairwise(critical))
        if other in around[one]
    ]
    for inner in parts(around, without | place.keys()):
        ends = {place[other] for variable in inner for other in around[variable] if other in place}
        segments.append(Segment(tuple(sorted(ends)), inner))
    return SegmentedModel(wide, critical, tuple(segments))


@dataclass(frozen=True, slots=True, eq=False)
class Cones:
    """A model of roots alone; without a price for memory its least cost is that of the whole."""

    model: MinSum
    roots: tuple[int, ...]
    """Of the model's variables: those that they were."""
    filled: tuple[FilledVariable, ...]
    """In the order in which they were."""

    def expanded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice for all variables that goes with one for the roots."""
        chosen = dict(zip(self.roots, choice, strict=True))
        for each in reversed(self.filled):
            chosen[each.variable] = int(each.best[tuple(chosen[end] for end in each.ends)])
        return tuple(chosen[variable] for variable in range(len(chosen)))


@dataclass(frozen=True, slots=True, eq=False)
class FilledVariable:
    """A non-root, and its best configuration for each of its neighbours'."""

    variable: int
    ends: tuple[int, ...]
    """One or two."""
    best: Array
    """An axis for each of `ends`."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Cost of choices, and the bytes that they need."""

    costs: Array
    memory: Array

    @property
    def turned(self) -> Sums:
        """The same with both axes exchanged."""
        return Sums(self.costs.T, self.memory.T)


def fill_cones(model: MinSum, rate: float = 0.0) -> Cones:
    """`model` with its cones filled so that cost, and `rate` for each byte, are least."""
    roots = is_root(model)
    filler = _Filler.of(merged(model), rate)
    filled = tuple(filler.fill(variable) for variable in np.flatnonzero(~roots).tolist() if filler.around[variable])
    return Cones(*filler.left(), filled)


@dataclass(eq=False, slots=True)
class _Filler:
    """A model on its way; equal sums are formed once."""

    rate: float
    own: dict[int, Sums]
    around: dict[int, dict[int, Sums]]
    """Of every variable left: its neighbours, and sums [own configurations, theirs]."""
    known: dict[Hashable, tuple[tuple[Sums, ...], Sums, Array]] = field(default_factory=dict)
    """By what was added, which is held so that its place stays its own."""
    added: dict[Hashable, tuple[tuple[Sums, Sums], Sums]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: MinSum, rate: float) -> _Filler:
        """Begins with a merged model."""
        made: dict[Hashable, Sums] = {}

        def sums(costs: Array, memory: Array | None) -> Sums:
            key = id(costs), id(memory)
            if key not in made:
                made[key] = Sums(costs, np.zeros(costs.shape, np.int64) if memory is None else memory)
            return made[key]

        memory = model.memory or (None,) * len(model.costs)
        own = {place: sums(*each) for place, each in enumerate(zip(model.costs, memory, strict=True))}
        around: dict[int, dict[int, Sums]] = {place: {} for place in own}
        turned: dict[int, Sums] = {}
        for edge in model.edges:
            both = sums(edge.costs, edge.memory)
            around[edge.source][edge.target] = both
            around[edge.target][edge.source] = turned.setdefault(id(both), both.turned)
        return cls(rate, own, around)

    def fill(self, variable: int) -> FilledVariable:
        """Take a variable of one or two neighbours away."""
        ends = tuple(sorted(self.around[variable]))
        parts = (self.own.pop(variable), *(self.around[variable][end] for end in ends))
        del self.around[variable]
        for end in ends:
            del self.around[end][variable]
        key = tuple(map(id, parts))
        if key not in self.known:
            self.known[key] = (parts, *_least(parts, self.rate))
        _, least, best = self.known[key]
        if len(ends) == 1:
            self.own[ends[0]] = self._sum(self.own[ends[0]], least)
        else:
            self._link(ends[0], ends[1], least)
        return FilledVariable(variable, ends, best)

    def left(self) -> tuple[MinSum, tuple[int, ...]]:
        """The remaining model, and its variables."""
        roots = tuple(self.own)
        number = {root: place for place, root in enumerate(roots)}
        edges = tuple(
            Edge(number[one], number[other], sums.costs, sums.memory)
            for one in roots
            for other, sums in self.around[one].items()
            if one < other
        )
        costs, memory = (tuple(getattr(each, name) for each in self.own.values()) for name in ("costs", "memory"))
        return MinSum(costs, edges, memory), roots

    def _link(self, one: int, other: int, sums: Sums) -> None:
        if other in self.around[one]:
            sums = self._sum(self.around[one][other], sums)
        self.around[one][other] = sums
        self.around[other][one] = self._turned(sums)

    def _turned(self, sums: Sums) -> Sums:
        key = "turned", id(sums)
        if key not in self.added:
            self.added[key] = (sums, sums), sums.turned
        return self.added[key][1]

    def _sum(self, one: Sums, other: Sums) -> Sums:
        key = id(one), id(other)
        if key not in self.added:
            self.added[key] = (one, other), Sums(one.costs + other.costs, one.memory + other.memory)
        return self.added[key][1]


def _least(parts: Sequence[Sums], rate: float) -> tuple[Sums, Array]:
    """Of a variable's own sums and those with its one or two ends the least, and which configuration that is."""
    own, *ends = parts
    if len(ends) == 1:
        ends = [ends[0], Sums(np.zeros((len(own.costs), 1)), np.zeros((len(own.costs), 1), np.int64))]
    first, second = ends
    shape = first.costs.shape[1], second.costs.shape[1]
    costs, memory, best = np.empty(shape), np.empty(shape, np.int64), np.empty(shape, np.int64)
    columns = np.arange(shape[1])
    behind = own.costs[:, None] + second.costs, own.memory[:, None] + second.memory
    priced = behind[0] + rate * behind[1]
    ahead = first.costs + rate * first.memory
    for rows in blocks(shape[0], priced.size):
        best[rows] = (ahead[:, rows].T[:, :, None] + priced[None]).argmin(axis=1)
    which = np.arange(shape[0])[:, None]
    costs[:] = first.costs.T[which, best] + behind[0][best, columns]
    memory[:] = first.memory.T[which, best] + behind[1][best, columns]
    if len(parts) == 2:
        return Sums(costs[:, 0], memory[:, 0]), best[:, 0]
    return Sums(costs, memory), best


ROUNDS = 5
"""Sweeps forth and back for bounds."""
MOST_PAIRS = 20_000
"""Of configurations on edges: what a segment's integer program may have."""

Ends = tuple[int, ...]
"""A strategy for each of a segment's ends: none, its head's, or its head's and its tail's."""


@dataclass(eq=False, slots=True)
class Pairs:
    """A segment as a merged model of its own: its inner variables first, then its ends, which cost nothing here."""

    model: MinSum
    inner: int
    """How many variables are inner ones."""
    costs: Array
    """An axis for each end: what the best inside that is known costs where that is settled, else a bound."""
    bounds: Array
    """Of the same shape: nothing costs less."""
    settled: Array
    """Of the same shape: whether it is."""
    choices: dict[Ends, tuple[int, ...]] = field(default_factory=dict)
    """The best inside, where that is settled."""
    headed: set[int] = field(default_factory=set)
    """Strategies of the head of which there are bounds of their own."""

    @classmethod
    def of(cls, model: MinSum, inner: int) -> Pairs:
        """Begins with bounds; what has no inside is settled."""
        if inner:
            bounds = _bounds(model, inner)
            return cls(model, inner, bounds.copy(), bounds, np.asarray(np.isinf(bounds)))
        # Ends of one strategy have no edges.
        costs = model.edges[0].costs if model.edges else np.zeros([len(end) for end in model.costs])
        return cls(model, inner, costs, costs, np.ones(costs.shape, dtype=bool))

    def inside(self, ends: Ends) -> tuple[int, ...]:
        """The best choice of the inner variables, where that is settled."""
        return self.choices[ends] if self.inner else ()

    def approach(self, ends: Ends, programs: Programs) -> None:
        """Come closer to what the inside costs: by a bound for the head's strategy, and then for good."""
        if len(ends) == 2 and ends[0] not in self.headed:
            self._bound(ends[0])
        else:
            self._settle(ends, programs)

    def _bound(self, head: int) -> None:
        """Bounds for one strategy of the head and all of the tail."""
        self.headed.add(head)
        bounds = np.maximum(self.bounds[head], _bounds(self._given((head,)), self.inner)[0])
        self.bounds[head] = bounds
        self.costs[head] = np.where(self.settled[head], self.costs[head], bounds)
        self.settled[head] |= np.isinf(bounds)

    def _settle(self, ends: Ends, programs: Programs) -> None:
        """Solve the integer program for one strategy of each end."""
        self.settled[ends] = True
        try:
            found = least_by_program(self._given(ends), programs, MOST_PAIRS)
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
        part.dual.tighten(forward=True)
        part.dual.tighten(forward=False)
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
    cost: float
    """Of nodes and segments, the wide variables' left out."""
    bound: float
    """No path costs less."""
    settled: bool
    """True if the integer programs on it are solved: else the cost is a bound, too."""


def shortest(
    model: MinSum, cut: SegmentedModel, pairs: Sequence[Pairs], programs: Programs, known: float, end: float | None
) -> Path:
    """The path that costs least, where that is less than `known`; what is found by `end` of the clock otherwise.

    Segments on the best path are settled until all of them are: then no other can cost less.
    """
    own = [model.costs[variable] for variable in cut.critical]
    while True:
        strategies, cost = _path_least(own, cut, [each.costs for each in pairs])
        ends = [tuple(strategies[place] for place in segment.ends) for segment in cut.segments]
        left = {(id(each), at): each for each, at in zip(pairs, ends, strict=True) if not each.settled[at]}
        if not left or cost >= known or is_over(end):
            _, bound = _path_least(own, cut, [each.bounds for each in pairs])
            return Path(strategies, cost, bound, not left)
        for (_, at), each in left.items():
            each.approach(at, programs)


def is_over(end: float | None) -> bool:
    """True if the clock has come to `end`."""
    return end is not None and time.monotonic() >= end


def choice_of(path: Path, cut: SegmentedModel, pairs: Sequence[Pairs], wide: Sequence[int]) -> tuple[int, ...]:
    """The choice for all variables that goes with a settled path."""
    chosen = dict(zip(cut.wide, wide, strict=True)) | dict(zip(cut.critical, path.strategies, strict=True))
    for segment, each in zip(cut.segments, pairs, strict=True):
        ends = tuple(path.strategies[place] for place in segment.ends)
        chosen.update(zip(segment.inner, each.inside(ends), strict=True))
    return tuple(chosen[variable] for variable in range(len(chosen)))


def _path_least(own: Sequence[Array], cut: SegmentedModel, tables: Sequence[Array]) -> tuple[tuple[int, ...], float]:
    """The strategies that cost least by the tables of all segments, and what they cost."""
    alone = [costs.astype(float) for costs in own]
    between: list[Array | None] = [None] * len(own)
    constant = 0.0
    for segment, table in zip(cut.segments, tables, strict=True):
        match segment.ends:
            case ():
                constant += float(table)
            case (one,):
                alone[one] += table
            case (one, _):
                known = between[one]
                between[one] = table if known is None else known + table
    if not own:
        return (), constant
    reached = alone[0]
    came_from: list[Array] = []
    for joint, costs in zip(between, alone[1:], strict=False):
        through = reached[:, None] + (0.0 if joint is None else joint)
        came_from.append(np.broadcast_to(through.argmin(axis=0), costs.shape))
        reached = through.min(axis=0) + costs
    strategies = [int(reached.argmin())]
    for sources in reversed(came_from):
        strategies.append(int(sources[strategies[-1]]))
    return tuple(reversed(strategies)), constant + float(reached.min())


@dataclass(eq=False, slots=True)
class EqualSegments:
    """Segments by what they are made of; equal layers have the same arrays."""

    known: dict[Hashable, Pairs] = field(default_factory=dict)
    """By where their arrays lie, all of which they hold."""

    def pairs(self, model: MinSum, cut: SegmentedModel) -> list[Pairs]:
        """Pairs of each segment of a merged model, whose wide variables have no edges."""
        around: list[list[Edge]] = [[] for _ in model.costs]
        for edge in model.edges:
            around[edge.source].append(edge)
            around[edge.target].append(edge)
        return [self._pairs(model, around, segment, cut) for segment in cut.segments]

    def _pairs(self, model: MinSum, around: Sequence[Sequence[Edge]], segment: Segment, cut: SegmentedModel) -> Pairs:
        ends = [cut.critical[place] for place in segment.ends]
        own = [model.costs[variable] for variable in segment.inner]
        free = [len(model.costs[end]) for end in ends]
        edges = _edges(around, (*segment.inner, *ends), len(own))
        key = (*map(id, own), *free, *((edge.source, edge.target, id(edge.costs)) for edge in edges))
        if key not in self.known:
            made = MinSum((*own, *map(np.zeros, free)), tuple(map(_forward, edges)))
            self.known[key] = Pairs.of(made, len(own))
        return self.known[key]


def _edges(around: Sequence[Sequence[Edge]], variables: Sequence[int], inner: int) -> list[Edge]:
    """The edges of a segment's inner variables, the first `inner` ones; without any the one between its two ends."""
    place = {variable: number for number, variable in enumerate(variables)}
    found = {
        (place[edge.source], place[edge.target]): edge
        for variable in variables[: inner or 1]
        for edge in around[variable]
        if edge.source in place and edge.target in place
    }
    return [Edge(*ends, edge.costs) for ends, edge in sorted(found.items(), key=lambda item: item[0])]


def _forward(edge: Edge) -> Edge:
    """The same from the lower to the higher place."""
    return edge if edge.source < edge.target else Edge(edge.target, edge.source, edge.costs.T)
