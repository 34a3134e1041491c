"""The series-parallel tree of a graph, and its blocks as a chain (Jeon et al., "GraphPipe" (2024),
section 5).

Two units (groups of nodes that stay together) are in series if one depends on the other, directly
or indirectly. A residual connection is therefore not a branch: the units that it skips are in
series with both of its ends. In a region that is not series-parallel, dependencies are added until
it is.

The chain lists blocks of units in a topological order. A stage of the search is a contiguous range
of the chain, which is convex: no path between two of its nodes leaves it. A stage may therefore end
inside one branch and start in another, contain several branches, or contain the end of a branch and
the join.
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
from autopipe.passes.partition.downsets import (
    connected_component,
    membership,
    set_bits,
    transitive_needs,
)


def make_units(graph: Graph) -> Blocks:
    """Return the units of a graph: groups of nodes that stay in one stage.

    Most units are single nodes. A view joins the node whose value it shows. Nodes that depend on no
    input (constants, transposed weights, positions), and nodes that each stage computes locally
    (`recomputed_nodes`), join their first reader. As separate units they would form artificial
    branches, parallel to all preceding nodes.
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
    """A series-parallel tree that consists of one unit, a group of nodes that stays in one
    stage.
    """

    unit: int


@dataclass(frozen=True, slots=True)
class Series:
    """Parts that run one after the other: each part depends on all units (groups of nodes that stay
    in one stage) of the preceding parts. No part is itself a Series.
    """

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that may run at the same time, because no part depends on another."""

    parts: tuple[Tree, ...]


Tree = Leaf | Series | Parallel


def units_in_order(tree: Tree) -> tuple[int, ...]:
    """Return the units (groups of nodes that stay in one stage) of a tree from its first to its
    last part, which is a topological order.
    """
    if isinstance(tree, Leaf):
        return (tree.unit,)
    return tuple(itertools.chain.from_iterable(map(units_in_order, tree.parts)))


def decompose_series_parallel(
    needs: Sequence[int], weights: Sequence[float]
) -> tuple[Tree, tuple[tuple[int, ...], ...]]:
    """Return (tree, regions) for units (groups of nodes that stay in one stage) that are numbered
    in topological order.

    tree: the series-parallel tree of all units.
    regions: the units of each minimal region that is not series-parallel. Dependencies were added
    inside these regions, where they lose the least parallelism (see `cut_with_least_loss`).

    `needs` contains, for each unit, a bit set of the units that it reads from, and `weights` the
    time of each unit.
    """
    above = transitive_needs(needs)
    linked = list(needs)
    for unit, need in enumerate(needs):
        for other in set_bits(need):
            linked[other] |= 1 << unit
    regions: list[tuple[int, ...]] = []

    def make_series(parts: Iterable[list[int]], inside: bool) -> Series:
        """Return a Series of the trees of `parts`. Parts that are Series themselves are replaced by
        their own parts.
        """
        found: list[Tree] = []
        for each in (make_tree(part, inside) for part in parts):
            found += each.parts if isinstance(each, Series) else (each,)
        return Series(tuple(found))

    def make_tree(units: list[int], inside: bool) -> Tree:
        """Return the tree of `units`, which are ascending. `inside` is True if they are part of a
        region that is not series-parallel and was already added to `regions`.
        """
        if len(units) == 1:
            return Leaf(units[0])
        runs = _divide_in_series(above, units)
        if len(runs) > 1:
            return make_series(runs, inside)
        branches = []
        left = sum(1 << unit for unit in units)
        while left:
            branches.append(connected_component(left, linked))
            left &= ~branches[-1]
        if len(branches) > 1:
            return Parallel(tuple(make_tree(set_bits(branch), inside) for branch in branches))
        if not inside:
            regions.append(tuple(units))
        first = cut_with_least_loss(units, above, weights)
        return make_series((first, sorted(set(units) - set(first))), True)

    return make_tree(list(range(len(needs))), False), tuple(regions)


def _divide_in_series(above: Sequence[int], units: list[int]) -> list[list[int]]:
    """Divide `units` (groups of nodes that stay in one stage) into the maximum number of
    consecutive parts such that each unit depends on all units of the preceding parts.

    `above` contains, for each unit, a bit set of all units that it depends on.
    """
    before = list(itertools.accumulate((1 << unit for unit in units), initial=0))
    shared = before[-1]
    cuts = [len(units)]
    for place in range(len(units) - 1, 0, -1):
        shared &= above[units[place]]
        if not before[place] & ~shared:
            cuts.append(place)
    return [units[start:stop] for stop, start in itertools.pairwise((*cuts, 0))][::-1]


_MAX_CUT_ENTRIES = 2**18
"""Maximum number of candidates of `cut_with_least_loss` times units. If there are more candidates,
only every k-th one is compared.
"""


def cut_with_least_loss(
    units: list[int], above: Sequence[int], weights: Sequence[float]
) -> list[int]:
    """Divide `units` (groups of nodes that stay in one stage), which are in topological order, into
    two parts such that the least parallelism is lost if the second part must wait for the first.
    Return the first part.

    `above` contains, for each unit, a bit set of all units that it depends on. The candidates for
    the first part are the prefixes of `units`, and, for each unit, four sets: the ancestors of the
    unit, and all units except its descendants, each with and without the unit itself.

    The weight of a pair, which has one unit of each part, is the product of the units' weights. The
    loss of a candidate is the weight of all pairs of independent units, divided by the weight of
    all pairs.
    """
    count = len(units)
    own = np.eye(count, dtype=bool)
    # earlier[i, j] is True if unit j depends on unit i.
    earlier = membership([above[unit] for unit in units], max(units) + 1)[:, units].T
    # Each row of `firsts` marks the units of a candidate, which contains all ancestors of its
    # units. Candidates that are empty or contain all units are removed.
    along = np.tri(count, count, -1, dtype=bool)[1:]
    firsts = np.concatenate((along, earlier.T | own, earlier.T, ~(earlier | own), ~earlier))
    sizes = firsts.sum(axis=1)
    firsts = np.unique(firsts[(sizes > 0) & (sizes < count)], axis=0)
    firsts = firsts[:: -(-len(firsts) * count // _MAX_CUT_ENTRIES)]
    free = ~(earlier | earlier.T | own)
    weight = np.array([weights[unit] for unit in units])
    weight = weight / max(float(weight.sum()), 1e-30) + 1e-6 / count
    lost = ((firsts * weight) @ free * weight * ~firsts).sum(axis=1)
    pairs = (firsts @ weight) * (~firsts @ weight)
    best = int(np.argmin(lost / pairs))
    return [unit for unit, inside in zip(units, firsts[best].tolist(), strict=True) if inside]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks `start` to `stop - 1` of a chain, which are in series."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Parallel branches. They occupy the blocks `start` to `stop - 1` of a chain, one branch after
    the other. Each branch is a sequence of regions: blocks in series, and nested forks.
    """

    branches: tuple[tuple[Region, ...], ...]
    start: int
    stop: int


Region = BlockRun | Fork


@dataclass(frozen=True, slots=True)
class BlockChain:
    """A chain of blocks in topological order, and the regions that the blocks form, in order. A
    region is a sequence of blocks in series (`BlockRun`) or a set of parallel branches (`Fork`).
    """

    chain: Chain
    regions: tuple[Region, ...]
    needs: tuple[int, ...]
    """For each block, a bit set of the blocks that it reads from."""


_SMALL_GRAPH = 32
"""Maximum number of units (groups of nodes that stay in one stage) of a graph in which all forks
are kept. In larger graphs, small forks (parallel branches) become blocks in series.
"""
_MIN_FORK_FRACTION = 32
"""In a larger graph, parallel branches become blocks in series if their work is at most the
reciprocal of this number (1 / 32) of all work, or at most all work divided by the number of
devices.
"""


def make_block_chain(
    graph: Graph, units: Blocks, tree: Tree, seconds: NDArray[np.float64], limit: int, devices: int
) -> BlockChain:
    """Return the chain of a series-parallel tree of `units` (groups of nodes that stay in one
    stage), with about `limit` blocks at most. `seconds` contains the time of each node.

    In a graph with more than `_SMALL_GRAPH` units, a fork (parallel branches) becomes blocks in
    series if its work is at most total / d. Here, total is the work of the graph, and d is the
    smaller of `devices` and `_MIN_FORK_FRACTION`. If there are more units than `limit`, adjacent
    units in series are merged into blocks, so that few bytes cross the boundaries between blocks.
    """
    order = units_in_order(tree)
    work = np.array([seconds[list(units.nodes[unit])].sum() for unit in order])
    total = float(work.sum())
    light = total / min(devices, _MIN_FORK_FRACTION) if len(order) > _SMALL_GRAPH else -1.0
    nodes = [node for unit in order for node in units.nodes[unit]]
    starts = np.cumsum([0, *(len(units.nodes[unit]) for unit in order)])
    crossing = crossing_bytes(graph, {node: place for place, node in enumerate(nodes)})[starts[:-1]]
    cuts: list[int] = []
    """Position in `order` of the first unit of each block."""

    def append_run(begins: list[int], stop: int) -> BlockRun:
        """Append blocks for the units at positions `begins[0]` to `stop - 1` of `order`, and return
        them. Each block starts at one of the positions `begins`.
        """
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

    def make_regions(part: Tree, place: int) -> list[Region]:
        """Return the regions (blocks in series, and forks) of a part of the tree. The first unit of
        the part is at position `place` of `order`.
        """
        found: list[Region] = []
        begins: list[int] = []
        for each in part.parts if isinstance(part, Series) else (part,):
            stop = place + len(units_in_order(each))
            if not isinstance(each, Parallel) or work[place:stop].sum() <= light:
                begins.append(place)
            else:
                if begins:
                    found.append(append_run(begins, place))
                    begins = []
                first = len(cuts)
                branches = []
                for branch in each.parts:
                    branches.append(tuple(make_regions(branch, place)))
                    place += len(units_in_order(branch))
                found.append(Fork(tuple(branches), first, len(cuts)))
            place = stop
        return [*found, append_run(begins, place)] if begins else found

    found = tuple(make_regions(tree, 0))
    chain = Chain.of(nodes, [int(starts[cut]) for cut in (*cuts, len(order))])
    needs = Blocks.of(graph, [chain.nodes(block, block + 1) for block in range(chain.blocks)]).needs
    return BlockChain(chain, found, needs)


FEW_UNITS = 8
"""Maximum number of units (groups of nodes that stay in one stage) of a graph for which many
topological orders are searched.
"""
_MAX_ORDERS = 64
"""Maximum number of trees of each kind (permuted branches, topological orders) that are searched.
"""


def alternative_trees(tree: Tree, needs: Sequence[int], weights: Sequence[float]) -> Iterator[Tree]:
    """Yield trees of the same units (groups of nodes that stay in one stage) whose chains have
    other topological orders, the most promising tree first. The chain of a tree lists its units in
    order, and a stage is a range of the chain.

    The chain of `tree` keeps each branch contiguous. If branches are uneven, other orders can have
    better stages. In an order by earliest finish time, a range can contain the first halves of two
    branches. If another branch is last, a range can contain this branch and the join. An order that
    interleaves branches is yielded as a Series, so each of its stages counts as dependent on the
    preceding stage, and its memory is computed as for a chain.

    `needs` contains, for each unit, a bit set of the units that it reads from, and `weights` the
    time of each unit.
    """
    few = len(needs) <= FEW_UNITS
    seen = {_branch_equality_key(tree, weights)}
    for each in (
        _reverse_branches(tree),
        *(itertools.islice(_permute_branches(tree), _MAX_ORDERS) if few else ()),
    ):
        if (key := _branch_equality_key(each, weights)) not in seen:
            seen.add(key)
            yield each
    # The units in the order of the leaves of `tree` form a chain that the search has already tried,
    # so this order is not yielded again.
    known = {units_in_order(tree)}
    every = itertools.islice(_topological_orders(needs, 0, ()), _MAX_ORDERS) if few else ()
    for order in (tuple(range(len(needs))), tuple(_order_by_finish_time(needs, weights)), *every):
        if order not in known:
            known.add(order)
            yield Series(tuple(map(Leaf, order)))


def _branch_equality_key(tree: Tree, weights: Sequence[float]) -> object:
    """Return a key that is equal for two trees if one can be obtained from the other by exchanging
    parts of equal structure and equal weights.
    """
    if isinstance(tree, Leaf):
        return weights[tree.unit]
    return type(tree).__name__, tuple(_branch_equality_key(part, weights) for part in tree.parts)


def _reverse_branches(tree: Tree) -> Tree:
    """Return the tree with the branches of each fork in reverse order."""
    if isinstance(tree, Leaf):
        return tree
    parts = tuple(map(_reverse_branches, tree.parts))
    return Series(parts) if isinstance(tree, Series) else Parallel(parts[::-1])


def _permute_branches(tree: Tree) -> Iterator[Tree]:
    """Yield the tree with the branches of its forks in all orders, the given order first. Of a
    nested tree, at most `_MAX_ORDERS` orders are combined with the orders of the other trees.
    """
    if isinstance(tree, Leaf):
        yield tree
        return
    for parts in itertools.product(
        *(tuple(itertools.islice(_permute_branches(part), _MAX_ORDERS)) for part in tree.parts)
    ):
        if isinstance(tree, Series):
            yield Series(parts)
        else:
            yield from map(Parallel, itertools.permutations(parts))


def _order_by_finish_time(needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the units (groups of nodes that stay in one stage) in ascending order of their
    earliest finish time, which assumes that each unit runs on a device of its own.

    `needs` contains, for each unit, a bit set of the units that it reads from, and `weights` the
    time of each unit.
    """
    times: list[tuple[float, float, int]] = []
    """(finish, start, unit number) of each unit."""
    for unit, (need, weight) in enumerate(zip(needs, weights, strict=True)):
        begun = max((times[other][0] for other in set_bits(need)), default=0.0)
        times.append((weight + begun, begun, unit))
    # A unit that takes no time finishes together with the units that it depends on. Sorting by
    # start and unit number as well keeps such units in topological order.
    return [unit for _, _, unit in sorted(times)]


def _topological_orders(
    needs: Sequence[int], done: int, order: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield each topological order of all units (groups of nodes that stay in one stage) that
    starts with `order`.

    `needs` contains, for each unit, a bit set of the units that it reads from. `done` is the bit
    set of the units in `order`.
    """
    if len(order) == len(needs):
        yield order
        return
    for unit, need in enumerate(needs):
        if not done >> unit & 1 and not need & ~done:
            yield from _topological_orders(needs, done | 1 << unit, (*order, unit))
