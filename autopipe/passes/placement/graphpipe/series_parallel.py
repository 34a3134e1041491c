"""A graph's series-parallel tree, and its blocks in one line, as Jeon et al., "GraphPipe" (2024),
section 5, cut it.

Two units are in series where one waits for the other, directly or not. So a residual connection is
no branch: what it skips lies between its two ends anyway. A region that is not series-parallel is
treated as if some of its units, which could run beside others, waited for them.

A stage of the search is a stretch of the line. Any stretch is convex, as the line is a topological
order: so a stage may also end in the middle of one branch and begin in another, hold several
branches, or the end of one and what joins them all.
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
from autopipe.passes.analysis.chain import (
    Blocks,
    Chain,
    choose_cuts,
    crossing_bytes,
    input_free_nodes,
)
from autopipe.passes.partition.downsets import bits, closed, component, membership


def make_units(graph: Graph) -> Blocks:
    """Every node a unit that no stage parts, but for nodes that would only be in the way. What
    depends on no input (constants, transposed weights, positions) goes with its first reader: such
    trees lie beside all that runs before, and would make branches out of nothing. So do nodes that
    every stage computes for itself. A view goes with the node whose value it shows.
    """
    sources = [tuple(dict.fromkeys(producer for _, producer in each)) for each in graph.sources()]
    aside = recomputed_nodes(graph) | input_free_nodes(graph)
    leaders = list(range(len(graph.nodes)))
    for index, node in enumerate(graph.nodes):
        row = operator_of(node)
        if row is not None and row.kind == "view" and len(sources[index]) == 1:
            (shown,) = sources[index]
            if index not in aside and shown not in aside:
                leaders[index] = leaders[shown]
    first_reader: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for index in range(len(leaders) - 1, -1, -1):
        if index in aside:
            leaders[index] = first_reader.get(index, index)
        for source in sources[index]:
            first_reader[source] = min(leaders[index], first_reader.get(source, leaders[index]))
        members.setdefault(leaders[index], []).append(index)
    return Blocks.of(graph, [members[leader] for leader in sorted(members)])


@dataclass(frozen=True, slots=True)
class Leaf:
    """One unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Series:
    """Parts of which each waits for all of those before it; none is a series itself."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that have nothing to do with one another."""

    parts: tuple[Tree, ...]


Tree = Leaf | Series | Parallel


def leaves(tree: Tree) -> tuple[int, ...]:
    """The units of a tree, parts one after the other: a topological order."""
    if isinstance(tree, Leaf):
        return (tree.unit,)
    return tuple(itertools.chain.from_iterable(map(leaves, tree.parts)))


def decompose(
    needs: Sequence[int], weights: Sequence[float]
) -> tuple[Tree, tuple[tuple[int, ...], ...]]:
    """The tree of units that wait for those in `needs` (as bits), numbered topologically; and the
    smallest regions that are not series-parallel, each as its units, ascending. `weights` say how
    much there is to lose where units of a region that is not series-parallel are put in an order.
    """
    above = closed(needs)
    linked = list(needs)
    for unit, need in enumerate(needs):
        for other in bits(need):
            linked[other] |= 1 << unit
    regions: list[tuple[int, ...]] = []

    def series(parts: Iterable[list[int]], inside: bool) -> Series:
        found: list[Tree] = []
        for each in (tree(part, inside) for part in parts):
            found += each.parts if isinstance(each, Series) else (each,)
        return Series(tuple(found))

    def tree(units: list[int], inside: bool) -> Tree:
        """The tree of some units, ascending; `inside` a region that is not series-parallel."""
        if len(units) == 1:
            return Leaf(units[0])
        runs = _in_series(above, units)
        if len(runs) > 1:
            return series(runs, inside)
        branches = []
        left = sum(1 << unit for unit in units)
        while left:
            branches.append(component(left, linked))
            left &= ~branches[-1]
        if len(branches) > 1:
            return Parallel(tuple(tree(bits(branch), inside) for branch in branches))
        if not inside:
            regions.append(tuple(units))
        first = least_ordering_cut(units, above, weights)
        return series((first, sorted(set(units) - set(first))), True)

    return tree(list(range(len(needs))), False), tuple(regions)


def _in_series(above: Sequence[int], units: list[int]) -> list[list[int]]:
    """The units cut wherever all that follow wait for all before. Such a cut parts any topological
    order in two.
    """
    before = list(itertools.accumulate((1 << unit for unit in units), initial=0))
    shared = before[-1]
    cuts = [len(units)]
    for place in range(len(units) - 1, 0, -1):
        shared &= above[units[place]]
        if not before[place] & ~shared:
            cuts.append(place)
    return [units[start:stop] for stop, start in itertools.pairwise((*cuts, 0))][::-1]


_MOST_CUTS = 2**18  # Places of cuts that are compared at once, times units.


def least_ordering_cut(
    units: list[int], above: Sequence[int], weights: Sequence[float]
) -> list[int]:
    """The first of two parts of `units`, ascending, the second of which is then to wait for all of
    the first. Of the cuts below or above one unit, and of those along the given order, it is the
    one that puts the smallest share of the pairs across it, by weight, in an order that they do not
    have.
    """
    count = len(units)
    own = np.eye(count, dtype=bool)
    # At [i, j] whether unit j waits for unit i.
    earlier = membership([above[unit] for unit in units], max(units) + 1)[:, units].T
    # A first part holds, with a unit, all that this waits for, and is neither empty nor all.
    along = np.tri(count, count, -1, dtype=bool)[1:]
    firsts = np.concatenate((along, earlier.T | own, earlier.T, ~(earlier | own), ~earlier))
    sizes = firsts.sum(axis=1)
    firsts = np.unique(firsts[(sizes > 0) & (sizes < count)], axis=0)
    firsts = firsts[:: -(-len(firsts) * count // _MOST_CUTS)]
    free = ~(earlier | earlier.T | own)
    weight = np.array([weights[unit] for unit in units])
    weight = weight / max(float(weight.sum()), 1e-30) + 1e-6 / count
    lost = ((firsts * weight) @ free * weight * ~firsts).sum(axis=1)
    pairs = (firsts @ weight) * (~firsts @ weight)
    best = int(np.argmin(lost / pairs))
    return [unit for unit, inside in zip(units, firsts[best].tolist(), strict=True) if inside]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks `start` to `stop - 1`, each of which waits for the one before."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches, one after the other in the line, from block `start` to `stop - 1`; each is a line
    of its own.
    """

    branches: tuple[tuple[Region, ...], ...]
    start: int
    stop: int


Region = BlockRun | Fork


@dataclass(frozen=True, slots=True)
class BlockLine:
    """Blocks of nodes in a topological order, and its regions from the first to the last."""

    chain: Chain
    regions: tuple[Region, ...]
    needs: tuple[int, ...]  # For each block the blocks that it reads from, as bits.


_FEW = 32  # Units of a graph so small that every fork of it is looked into.
_FORKS = 32  # Of a larger graph, forks with less than this part of all work are not looked into.


def make_line(
    graph: Graph, units: Blocks, tree: Tree, seconds: NDArray[np.float64], limit: int, devices: int
) -> BlockLine:
    """The line of a tree, in at most about `limit` blocks; `seconds` weighs each node. But in a
    small graph, forks with less work than what each of `devices` gets, or tiny ones, become blocks.
    Where there are more units, each run's units are joined where many bytes cross.
    """
    order = leaves(tree)
    work = np.array([seconds[list(units.nodes[unit])].sum() for unit in order])
    total = float(work.sum())
    light = total / min(devices, _FORKS) if len(order) > _FEW else -1.0
    nodes = [node for unit in order for node in units.nodes[unit]]
    starts = np.cumsum([0, *(len(units.nodes[unit]) for unit in order)])
    crossing = crossing_bytes(graph, {node: place for place, node in enumerate(nodes)})[starts[:-1]]
    cuts: list[int] = []  # The place of the first unit of each block.

    def run(begins: list[int], stop: int) -> BlockRun:
        """The units before `stop` as blocks, each of which begins at some of `begins`."""
        own = np.add.reduceat(work[:stop], begins)
        most = (
            max(1, round(limit / max(total, 1e-30) * float(own.sum())))
            if len(order) > limit
            else len(own)
        )
        chosen = choose_cuts(crossing[begins], own, most - 1 if most < len(own) else most)
        first = len(cuts)
        cuts.extend(begins[each] for each in (0, *chosen))
        return BlockRun(first, len(cuts))

    def regions(part: Tree, place: int) -> list[Region]:
        """The regions of a part of the tree that begins at `place`."""
        found: list[Region] = []
        begins: list[int] = []
        for each in part.parts if isinstance(part, Series) else (part,):
            stop = place + len(leaves(each))
            if not isinstance(each, Parallel) or work[place:stop].sum() <= light:
                begins.append(place)
            else:
                if begins:
                    found.append(run(begins, place))
                    begins = []
                first = len(cuts)
                branches = []
                for branch in each.parts:
                    branches.append(tuple(regions(branch, place)))
                    place += len(leaves(branch))
                found.append(Fork(tuple(branches), first, len(cuts)))
            place = stop
        return [*found, run(begins, place)] if begins else found

    found = tuple(regions(tree, 0))
    chain = Chain.of(nodes, [int(starts[cut]) for cut in (*cuts, len(order))])
    needs = Blocks.of(graph, [chain.nodes(block, block + 1) for block in range(chain.blocks)]).needs
    return BlockLine(chain, found, needs)


FEW = 8  # Units of a graph so small that many lines are looked at.
_MOST_LINES = 64  # Of each kind.


def other_orders(tree: Tree, needs: Sequence[int], weights: Sequence[float]) -> Iterator[Tree]:
    """Trees whose leaves are the same units in other topological orders, the most promising first,
    each once.

    A tree's own line keeps branches together. Where branches are uneven, a stage of the first
    halves of two of them can be better, which is a stretch of a line that takes the units by depth;
    or one of another branch and what joins them, which is a stretch where that branch comes last.
    In lines that tear branches apart every stage is taken to wait for the one before, so memory
    counts as for a chain.

    `needs` are the units that each reads from, as bits, and `weights` what each takes.
    """
    few = len(needs) <= FEW
    seen = {_equal_branches(tree, weights)}
    for each in (_mirrored(tree), *(itertools.islice(_permuted(tree), _MOST_LINES) if few else ())):
        if (key := _equal_branches(each, weights)) not in seen:
            seen.add(key)
            yield each
    # The stretches of the tree's own order are those of its line.
    known = {leaves(tree)}
    every = itertools.islice(_extensions(needs, 0, ()), _MOST_LINES) if few else ()
    for order in (tuple(range(len(needs))), tuple(_by_depth(needs, weights)), *every):
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


def _permuted(tree: Tree) -> Iterator[Tree]:
    """The tree with its branches in every order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    for parts in itertools.product(
        *(tuple(itertools.islice(_permuted(part), _MOST_LINES)) for part in tree.parts)
    ):
        if isinstance(tree, Series):
            yield Series(parts)
        else:
            yield from map(Parallel, itertools.permutations(parts))


def _by_depth(needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The units by when they could be done, if each had a device of its own."""
    times: list[tuple[float, float, int]] = []  # When each is done, and begun.
    for unit, (need, weight) in enumerate(zip(needs, weights, strict=True)):
        begun = max((times[other][0] for other in bits(need)), default=0.0)
        times.append((weight + begun, begun, unit))
    # What takes no time is done when that is which it waits for: the unit's number keeps such units
    # in order.
    return [unit for _, _, unit in sorted(times)]


def _extensions(
    needs: Sequence[int], done: int, order: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Every topological order."""
    if len(order) == len(needs):
        yield order
        return
    for unit, need in enumerate(needs):
        if not done >> unit & 1 and not need & ~done:
            yield from _extensions(needs, done | 1 << unit, (*order, unit))
