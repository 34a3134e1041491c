"""The series-parallel tree of a graph's units.

Two units are in series where one waits for the other, directly or not. So a residual connection is no branch: what it
skips lies between its two ends anyway. Jeon et al., "GraphPipe" (2024), section 5, decompose the graph so that stages
of parallel parts can run at the same time.

The tree's units in one line of blocks, and which stretches of the line are branches.

A stage of the search is a stretch of this line. Any stretch is convex, as the line is a topological order: so stages
may also end in the middle of one branch and begin in another, hold several branches, or the end of one and what joins
them all.

Other lines of the same units: stages may be stretches of one line and not of another.

A tree's own line keeps branches together. Where branches are uneven, a stage of the first halves of two of them can be
better, which is a stretch of a line that takes the units by depth; or one of another branch and what joins them, which
is a stretch where that branch comes last. In lines that tear branches apart every stage is taken to wait for the one
before, so memory counts as for a chain.

A graph's nodes joined into units that no stage parts, and what each unit waits for.

Where to cut a region that is not series-parallel, at the least loss of what could run at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.analysis.chain import Chain, choose_cuts, crossing_bytes

_MOST_CUTS = 2**18
"""Places of cuts that are compared at once, times units."""


def least_ordering_cut(units: list[int], above: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The first of two parts of `units`, ascending, the second of which is then to wait for all of the first.

    Of the cuts below or above one unit, and of those along the given order, it is the one that puts the smallest share
    of the pairs across it, by weight, in an order that they do not have.
    """
    count = len(units)
    earlier = _matrix(units, above)
    free = ~(earlier | earlier.T | np.eye(count, dtype=bool))
    weight = np.array([weights[unit] for unit in units])
    weight = weight / max(float(weight.sum()), 1e-30) + 1e-6 / count
    firsts = _first_parts(earlier)
    lost = ((firsts * weight) @ free * weight * ~firsts).sum(axis=1)
    pairs = (firsts @ weight) * (~firsts @ weight)
    best = int(np.argmin(lost / pairs))
    return [unit for unit, inside in zip(units, firsts[best].tolist(), strict=True) if inside]


def _matrix(units: list[int], above: Sequence[int]) -> NDArray[np.bool_]:
    """`[i, j]`: whether unit j waits for unit i."""
    size = (max(units) + 8) // 8
    rows = [
        np.frombuffer(above[unit].to_bytes(-(-max(above[unit].bit_length(), 1) // 8), "little")[:size], np.uint8)
        for unit in units
    ]
    found = np.zeros((len(units), size), dtype=np.uint8)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    waits: NDArray[np.bool_] = np.unpackbits(found, axis=1, bitorder="little")[:, units].astype(bool).T
    return waits


def _first_parts(earlier: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """First parts of possible cuts, a row each: neither empty nor all, and each with all that its units wait for."""
    count = len(earlier)
    own = np.eye(count, dtype=bool)
    along = np.tri(count, count, -1, dtype=bool)[1:]
    found = np.concatenate((along, earlier.T | own, earlier.T, ~(earlier | own), ~earlier))
    sizes = found.sum(axis=1)
    found = np.unique(found[(sizes > 0) & (sizes < count)], axis=0)
    step = -(-len(found) * count // _MOST_CUTS)
    chosen: NDArray[np.bool_] = found[::step]
    return chosen


@dataclass(frozen=True, slots=True)
class Leaf:
    """One unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Series:
    """Parts of which each waits for all of those before it."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that have nothing to do with one another."""

    parts: tuple[Tree, ...]


Tree = Leaf | Series | Parallel


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The tree, and the regions that are not series-parallel: the smallest ones, each as its units, ascending.

    A stage graph that keeps to the tree treats such a region as if some of its units, which could run beside others,
    waited for them.
    """

    tree: Tree
    regions: tuple[tuple[int, ...], ...] = ()


def decompose(needs: Sequence[int], weights: Sequence[float]) -> Decomposition:
    """The tree of units that wait for those in `needs` (as bits), numbered topologically.

    `weights` say how much there is to lose where units of a region that is not series-parallel are put in an order.
    """
    relations = Relations(tuple(needs))
    regions: list[tuple[int, ...]] = []
    tree = _tree(relations, list(range(len(needs))), weights, regions, False)
    return Decomposition(tree, tuple(regions))


def leaves(tree: Tree) -> tuple[int, ...]:
    """The units of a tree, parts one after the other: a topological order."""
    if isinstance(tree, Leaf):
        return (tree.unit,)
    return tuple(itertools.chain.from_iterable(map(leaves, tree.parts)))


class Relations:
    """Transitive dependencies as bits."""

    def __init__(self, needs: tuple[int, ...]) -> None:
        self.needs = needs
        self.above: list[int] = []
        """All that a unit waits for."""
        self.linked = list(needs)
        """Neighbours of a unit: those it reads from and its readers."""
        for unit, need in enumerate(needs):
            above = need
            for other in bits(need):
                above |= self.above[other]
                self.linked[other] |= 1 << unit
            self.above.append(above)


def bits(mask: int) -> list[int]:
    """The places of the ones of a number, ascending."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _tree(
    relations: Relations, units: list[int], weights: Sequence[float], regions: list[tuple[int, ...]], inside: bool
) -> Tree:
    """The tree of some units, ascending; `inside` a region that is not series-parallel."""
    if len(units) == 1:
        return Leaf(units[0])
    runs = _in_series(relations, units)
    if len(runs) > 1:
        return _series(_tree(relations, run, weights, regions, inside) for run in runs)
    branches = _components(relations, units)
    if len(branches) > 1:
        return Parallel(tuple(_tree(relations, branch, weights, regions, inside) for branch in branches))
    if not inside:
        regions.append(tuple(units))
    first = least_ordering_cut(units, relations.above, weights)
    cut = set(first)
    rest = [unit for unit in units if unit not in cut]
    return _series(_tree(relations, each, weights, regions, True) for each in (first, rest))


def _series(parts: Iterable[Tree]) -> Series:
    return Series(tuple(itertools.chain.from_iterable(p.parts if isinstance(p, Series) else (p,) for p in parts)))


def _in_series(relations: Relations, units: list[int]) -> list[list[int]]:
    """The units cut wherever all that follow wait for all before. Such a cut parts any topological order in two."""
    before = [0]
    for unit in units:
        before.append(before[-1] | 1 << unit)
    shared = before[-1]
    cuts = [len(units)]
    for place in range(len(units) - 1, 0, -1):
        shared &= relations.above[units[place]]
        if not before[place] & ~shared:
            cuts.append(place)
    cuts.append(0)
    return [units[start:stop] for stop, start in itertools.pairwise(cuts)][::-1]


def _components(relations: Relations, units: list[int]) -> list[list[int]]:
    """Units that are linked with one another, directly or not; those with the first unit first."""
    left = sum(1 << unit for unit in units)
    found = []
    while left:
        reached, waiting = 0, left & -left
        while waiting:
            reached |= waiting
            new = 0
            for unit in bits(waiting):
                new |= relations.linked[unit]
            waiting = new & left & ~reached
        left &= ~reached
        found.append(bits(reached))
    return found


@dataclass(frozen=True, slots=True)
class Units:
    """Sets of nodes in a topological order of the units."""

    nodes: tuple[tuple[int, ...], ...]
    """The nodes of each unit, ascending."""
    needs: tuple[int, ...]
    """For each unit the units that it reads from, as bits."""


def make_units(graph: Graph) -> Units:
    """Every node a unit, but for nodes that would only be in the way.

    What depends on no input (constants, transposed weights, positions) goes with its first reader: such trees lie
    beside all that runs before, and would make branches out of nothing. A view goes with the node whose value it shows.
    Values that every stage computes for itself (`recomputed_nodes`) make no unit wait.
    """
    leaders = _leaders(graph)
    members: dict[int, list[int]] = {}
    for node, leader in enumerate(leaders):
        members.setdefault(leader, []).append(node)
    order = sorted(members)
    unit_of = {leader: unit for unit, leader in enumerate(order)}
    recomputed = recomputed_nodes(graph)
    needs = [0] * len(order)
    for node, leader in enumerate(leaders):
        if node in recomputed:
            continue
        for producer in _producers(graph, node):
            if producer not in recomputed and leaders[producer] != leader:
                needs[unit_of[leader]] |= 1 << unit_of[leaders[producer]]
    return Units(tuple(tuple(members[leader]) for leader in order), tuple(needs))


def _leaders(graph: Graph) -> list[int]:
    """For each node the one that its unit is named after: the first that depends on an input, and on no view of it."""
    producers = [_producers(graph, index) for index in range(len(graph.nodes))]
    aside = recomputed_nodes(graph) | _without_inputs(graph, producers)
    leaders = list(range(len(graph.nodes)))
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for producer in producers[index]:
            readers.setdefault(producer, []).append(index)
        row = operator_of(node)
        if row is not None and row.kind == "view" and len(producers[index]) == 1:
            (shown,) = producers[index]
            if index not in aside and shown not in aside:
                leaders[index] = leaders[shown]
    for index in sorted(aside, reverse=True):
        leaders[index] = min((leaders[reader] for reader in readers.get(index, ())), default=index)
    return leaders


def _without_inputs(graph: Graph, producers: list[list[int]]) -> set[int]:
    """Nodes that depend on no input of the model."""
    inputs = {value.name for value in graph.inputs}
    found: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if inputs.isdisjoint(node.inputs) and found.issuperset(producers[index]):
            found.add(index)
    return found


def _producers(graph: Graph, index: int) -> list[int]:
    """The nodes whose values a node reads, each once."""
    found = (graph.producer(name) for name in graph.nodes[index].inputs if name)
    return list(dict.fromkeys(producer for producer in found if producer is not None))


_FEW = 32
"""Units of a graph so small that every fork of it is looked into."""


_FORKS = 32
"""Of a larger graph, forks with less than this part of all work are not looked into."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks `start` to `stop - 1`, each of which waits for the one before."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches, one after the other in the line, from block `start` to `stop - 1`; each is a line of its own."""

    branches: tuple[tuple[Region, ...], ...]
    start: int
    stop: int


Region = BlockRun | Fork


@dataclass(frozen=True, slots=True)
class BlockLine:
    """Blocks of nodes in a topological order, and its regions from the first to the last."""

    chain: Chain
    regions: tuple[Region, ...]
    needs: tuple[int, ...]
    """For each block the blocks that it reads from, as bits."""


def make_line(
    graph: Graph, units: Units, tree: Tree, seconds: NDArray[np.float64], limit: int, devices: int
) -> BlockLine:
    """The line of a tree, in at most about `limit` blocks; `seconds` weighs each node.

    But in a small graph, forks with less work than what each of `devices` gets, or tiny ones, become runs. Where there
    are more units, each run's units are joined where many bytes cross.
    """
    weights = np.array([seconds[list(nodes)].sum() for nodes in units.nodes])
    order = leaves(tree)
    light = float(weights.sum()) / min(devices, _FORKS) if len(order) > _FEW else -1.0
    drafts = _drafts(tree, weights, light)
    nodes = [node for unit in order for node in units.nodes[unit]]
    place = np.empty(len(nodes), dtype=np.int64)
    place[nodes] = np.arange(len(nodes))
    starts = np.cumsum([0, *(len(units.nodes[unit]) for unit in order)])
    crossing = crossing_bytes(graph, place)[starts[:-1]]
    share = limit / max(float(weights.sum()), 1e-30)
    cuts: list[int] = []
    regions = tuple(_placed(drafts, 0, crossing, weights[list(order)], share if len(order) > limit else np.inf, cuts))
    edges = [int(starts[cut]) for cut in (*cuts, len(order))]
    block_of = np.searchsorted(np.array(edges), place, side="right") - 1
    return BlockLine(Chain(tuple(nodes), tuple(edges), block_of), regions, _block_needs(units, block_of))


def _block_needs(units: Units, block_of: NDArray[np.int64]) -> tuple[int, ...]:
    blocks = [int(block_of[nodes[0]]) for nodes in units.nodes]
    needs = [0] * (max(blocks) + 1)
    for block, need in zip(blocks, units.needs, strict=True):
        for other in bits(need):
            needs[block] |= 1 << blocks[other]
    return tuple(need & ~(1 << block) for block, need in enumerate(needs))


Draft = int | tuple["list[Draft]", ...]
"""A range of units in a run, or the branches of a fork."""


def _drafts(tree: Tree, weights: NDArray[np.float64], light: float) -> list[Draft]:
    """The regions of a tree in numbers of units; forks of at most `light` work count as runs."""
    if isinstance(tree, Leaf):
        return [1]
    if isinstance(tree, Series):
        return list(itertools.chain.from_iterable(_drafts(part, weights, light) for part in tree.parts))
    units = leaves(tree)
    if weights[list(units)].sum() <= light:
        return [len(units)]
    return [tuple(_drafts(part, weights, light) for part in tree.parts)]


def _placed(
    drafts: list[Draft],
    place: int,
    crossing: NDArray[np.float64],
    weights: NDArray[np.float64],
    share: float,
    cuts: list[int],
) -> Iterator[Region]:
    """The regions of drafts that begin with unit `place` of the line; `cuts` grows by the first unit of each block."""
    for is_run, group in itertools.groupby(drafts, key=lambda draft: isinstance(draft, int)):
        if is_run:
            lengths = [length for length in group if isinstance(length, int)]
            begins = place + np.cumsum([0, *lengths])
            work = np.add.reduceat(weights, begins[:-1])[: len(lengths)]
            work[-1] = weights[begins[-2] : begins[-1]].sum()
            most = min(len(lengths), max(1, round(min(share * float(work.sum()), 1e9))))
            chosen = [
                0,
                *(
                    choose_cuts(crossing[begins[:-1]], work, most - 1)
                    if most < len(lengths)
                    else range(1, len(lengths))
                ),
            ]
            first = len(cuts)
            cuts.extend(int(begins[each]) for each in chosen)
            yield BlockRun(first, len(cuts))
            place = int(begins[-1])
            continue
        for fork in group:
            assert isinstance(fork, tuple)
            first = len(cuts)
            branches = []
            for branch in fork:
                branches.append(tuple(_placed(branch, place, crossing, weights, share, cuts)))
                place += _length(branch)
            yield Fork(tuple(branches), first, len(cuts))


def _length(drafts: list[Draft]) -> int:
    return sum(draft if isinstance(draft, int) else sum(map(_length, draft)) for draft in drafts)


FEW = 8
"""Units of a graph so small that many lines are looked at."""

_MOST_LINES = 64
"""Of each kind."""


def other_orders(tree: Tree, needs: Sequence[int], weights: Sequence[float]) -> Iterator[Tree]:
    """Trees whose leaves are the same units in other topological orders, the most promising first, each once.

    `needs` are the units that each reads from, as bits, and `weights` what each takes.
    """
    count = len(needs)
    few = count <= FEW
    seen = {_equal_branches(tree, weights)}
    for each in (_mirrored(tree), *(itertools.islice(_permuted(tree), _MOST_LINES) if few else ())):
        if _equal_branches(each, weights) not in seen:
            seen.add(_equal_branches(each, weights))
            yield each
    # The stretches of the tree's own order are those of its line.
    known = {leaves(tree)}
    every = itertools.islice(_extensions(needs, 0, ()), _MOST_LINES) if few else ()
    for order in (tuple(range(count)), tuple(_by_depth(needs, weights)), *every):
        if order not in known:
            known.add(order)
            yield Series(tuple(map(Leaf, order)))


def _equal_branches(tree: Tree, weights: Sequence[float]) -> object:
    """Equal for trees that differ in the order of equal branches alone."""
    if isinstance(tree, Leaf):
        return weights[tree.unit]
    return type(tree).__name__, tuple(_equal_branches(part, weights) for part in tree.parts)


def _mirrored(tree: Tree) -> Tree:
    """The last branch first."""
    if isinstance(tree, Leaf):
        return tree
    parts = tuple(map(_mirrored, tree.parts))
    return Series(parts) if isinstance(tree, Series) else Parallel(parts[::-1])


def _by_depth(needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The units by when they could be done, if each had a device of its own."""
    done: list[float] = []
    for need, weight in zip(needs, weights, strict=True):
        done.append(weight + max((done[other] for other in bits(need)), default=0.0))
    latest = [max((done[other] for other in bits(need)), default=0.0) for need in needs]
    # What takes no time is done when that is which it waits for: the unit's number keeps such units in order.
    return sorted(range(len(needs)), key=lambda unit: (done[unit], latest[unit], unit))


def _permuted(tree: Tree) -> Iterator[Tree]:
    """The tree with its branches in every order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    for parts in itertools.product(*(tuple(itertools.islice(_permuted(part), _MOST_LINES)) for part in tree.parts)):
        if isinstance(tree, Series):
            yield Series(parts)
        else:
            yield from map(Parallel, itertools.permutations(parts))


def _extensions(needs: Sequence[int], done: int, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every topological order."""
    if len(order) == len(needs):
        yield order
        return
    for unit, need in enumerate(needs):
        if not done >> unit & 1 and not need & ~done:
            yield from _extensions(needs, done | 1 << unit, (*order, unit))
