"""A graph as a chain: its nodes in topological order, divided into blocks of consecutive nodes.
Also sums over all contiguous ranges of blocks, for searches that assign such ranges to stages.

`make_chain` puts the boundaries between blocks where few bytes cross. The sums over all ranges are
matrices indexed by (first block, block after the last block). Entry [i, j] is defined for i <= j.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.placement import recomputed_nodes


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes in a topological order, divided into blocks of consecutive nodes.

    order: the node at each position.
    cuts: ascending positions from 0 to the number of nodes; block b has the nodes at positions
    `cuts[b]` to `cuts[b + 1] - 1`.
    block_of: for each node, the index of its block.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    block_of: NDArray[np.int64]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.cuts) - 1

    @staticmethod
    def of(order: Sequence[int], cuts: Iterable[int]) -> Chain:
        """Return the chain of the nodes `order` whose blocks begin and end at the positions `cuts`.
        These include 0 and the number of nodes, and can be in any order.
        """
        edges = sorted(set(cuts))
        block_of = np.empty(len(order), dtype=np.int64)
        block_of[list(order)] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        return Chain(tuple(order), tuple(edges), block_of)

    def nodes(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the indices of the nodes of blocks `first` to `stop - 1`, in ascending order."""
        return tuple(sorted(self.order[self.cuts[first] : self.cuts[stop]]))

    def sums_by_block(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return, for each block, the sum of `values` over its nodes. `values` contains one number
        per node of the graph, in graph order.
        """
        sums = np.zeros(self.blocks)
        np.add.at(sums, self.block_of, values)
        return sums


@dataclass(frozen=True, slots=True)
class Blocks:
    """Disjoint sets of nodes in a topological order, with the dependencies between the sets."""

    nodes: tuple[tuple[int, ...], ...]
    """The indices of the nodes of each block, in ascending order."""
    needs: tuple[int, ...]
    """For each block, an integer whose bit b is set if the block reads a value that block b
    computes.
    """

    @staticmethod
    def of(graph: Graph, nodes: Sequence[Iterable[int]]) -> Blocks:
        """Return the blocks that consist of the given sets of nodes. A block must not read from a
        later block; this is not checked.
        """
        needs = [0] * len(nodes)
        block_of = {node: block for block, each in enumerate(nodes) for node in each}
        for _, block, readers in values_between_blocks(graph, block_of):
            for reader in readers:
                needs[reader] |= 1 << block
        return Blocks(tuple(tuple(sorted(each)) for each in nodes), tuple(needs))


def input_free_nodes(graph: Graph) -> set[int]:
    """Return the indices of the nodes that depend on no input of the model, such as a transposed
    weight.
    """
    inputs = {value.name for value in graph.inputs}
    found: set[int] = set()
    for index, (node, sources) in enumerate(zip(graph.nodes, graph.sources(), strict=True)):
        if inputs.isdisjoint(node.inputs) and found.issuperset(producer for _, producer in sources):
            found.add(index)
    return found


@memoize(MAX_CACHED_GRAPHS)
def linear_order(graph: Graph) -> tuple[int, ...]:
    """Return the nodes in the order of the graph, except that nodes that depend on no input of the
    model are moved. Such a node comes directly before the first node that needs it and depends on
    an input. It comes last if there is no such node.

    In graph order, the values of the moved nodes (a transposed weight, a position table) would
    cross each block boundary between them and their readers.
    """
    floating = input_free_nodes(graph)
    order: dict[int, None] = {}
    for index in (
        *(index for index in range(len(graph.nodes)) if index not in floating),
        *sorted(floating),
    ):
        waiting = [index]
        while waiting:
            last = waiting[-1]
            producers = [graph.producer(name) for name in graph.nodes[last].inputs if name]
            missing = [
                each
                for each in producers
                if each is not None and each in floating and each not in order
            ]
            if missing:
                waiting += missing
            else:
                order.setdefault(waiting.pop())
    return tuple(order)


def make_chain(
    graph: Graph, seconds: NDArray[np.float64], limit: int, groups: tuple[tuple[int, ...], ...] = ()
) -> Chain:
    """Return the graph as a chain of at most `limit` + 1 blocks, plus 2 per group of `groups`.

    `seconds` contains the time of each node. `choose_cuts` chooses the boundaries. Additional
    boundaries are before the first and after the last node of each group.
    """
    order = linear_order(graph)
    place = {node: index for index, node in enumerate(order)}
    cuts = {0, *choose_cuts(crossing_bytes(graph, place), seconds[list(order)], limit), len(order)}
    for group in groups:
        places = [place[node] for node in group]
        cuts |= {min(places), max(places) + 1}
    return Chain.of(order, cuts)


def values_between_blocks(
    graph: Graph, block_of: Mapping[int, int]
) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (value, block that computes it, other blocks that read it in ascending order) for each
    value that another block reads.

    `block_of` is the block of each node. Nodes without a block are ignored. The values of
    `recomputed_nodes` are omitted, because each block that reads them computes them itself.
    """
    recomputed = recomputed_nodes(graph)
    for name, reading in graph.consumers().items():
        producer = graph.producer(name)
        if producer is not None and producer not in recomputed and producer in block_of:
            block = block_of[producer]
            readers = sorted(
                {block_of[reader] for reader in reading if reader in block_of} - {block}
            )
            if readers:
                yield name, block, readers


def crossing_bytes(graph: Graph, position: Mapping[int, int]) -> NDArray[np.float64]:
    """Return, for each position p of a chain, the bytes of the full values that are computed before
    position p and read at p or later.

    `position` is the position of each node. Inputs, parameters and the values of `recomputed_nodes`
    do not count.
    """
    change = np.zeros(len(position) + 1)
    for name, start, readers in values_between_blocks(graph, position):
        change[[start + 1, readers[-1] + 1]] += np.array([1.0, -1.0]) * graph.type_of(name).bytes
    crossing: NDArray[np.float64] = np.cumsum(change)[: len(position)]
    return crossing


def choose_cuts(
    crossing: NDArray[np.float64], seconds: NDArray[np.float64], limit: int
) -> list[int]:
    """Return up to `limit` positions of block boundaries, in ascending order, or all positions if
    there are at most `limit` nodes.

    `crossing` contains the bytes that cross each position, `seconds` the time of the node at each
    position. The total time is divided into about `limit` / 2 equal intervals, and the position
    with the fewest crossing bytes in each interval becomes a boundary. The remaining boundaries are
    at the other positions with the fewest crossing bytes.
    """
    count = len(seconds)
    if count <= limit:
        return list(range(1, count))
    done = np.cumsum(seconds) - seconds
    # Boundaries with nearly no work between them would waste blocks. In each interval of 1 / (16 ·
    # limit) of the total time, only the position with the minimum crossing bytes remains.
    interval = np.floor(done / max(float(done[-1]), 1e-30) * 16 * limit)
    places = np.lexsort((np.arange(count), crossing, interval))
    places = places[np.concatenate(([True], np.diff(interval[places]) > 0))]
    places = places[places > 0]
    if not len(places) or limit < 1:
        return []
    bucket = np.floor(done[places] / max(float(done[-1]), 1e-30) * (limit // 2))
    even = places[np.lexsort((places, crossing[places], bucket))]
    even = even[np.concatenate(([True], np.diff(np.sort(bucket)) > 0))]
    chosen = set(even.tolist())
    rest = [
        place
        for place in places[np.lexsort((places, crossing[places]))].tolist()
        if place not in chosen
    ]
    return sorted([*chosen, *rest[: limit - len(chosen)]])


Matrix = NDArray[np.float64]


def range_sums(blocks: NDArray[np.float64]) -> Matrix:
    """Return the matrix that has at [i, j] the sum of the numbers of blocks i to j - 1. `blocks`
    has one number per block; the matrix has one more row and column than blocks.
    """
    prefix = np.concatenate(([0.0], np.cumsum(blocks)))
    return prefix[None, :] - prefix[:, None]


def range_maxima(blocks: NDArray[np.float64]) -> Matrix:
    """Return the matrix that has at [i, j] the maximum of the numbers of blocks i to j - 1, and 0
    for an empty range. `blocks` contains one number per block.
    """
    count = len(blocks)
    found = np.zeros((count + 1, count + 1))
    for first in range(count):
        found[first, first + 1 :] = np.maximum.accumulate(blocks[first:])
    return found


def item_sums(count: int, items: Iterable[tuple[list[int], float]]) -> Matrix:
    """Return the matrix that has at [i, j] the sum of the weights of the items that have at least
    one of their blocks among blocks i to j - 1. Each such item counts once.

    An item is a pair (its blocks in ascending order, weight). `count` is the number of blocks.
    """
    return incoming_sums(count, ((-1, blocks, weight) for blocks, weight in items))


def incoming_sums(count: int, values: Iterable[tuple[int, list[int], float]]) -> Matrix:
    """Return the matrix that has at [i, j] the sum of the weights of the values that a block before
    i computes and a block of i to j - 1 reads. Each such value counts once.

    A value is a triple (block that computes it, blocks that read it in ascending order, weight).
    `count` is the number of blocks.
    """
    weights = np.zeros((count + 1, count))
    for before, readers, weight in values:
        for reader in readers:
            if reader != before:
                weights[before + 1, reader] += weight
                before = reader
    reachable = np.cumsum(weights, axis=0)
    prefix = np.concatenate((np.zeros((count + 1, 1)), np.cumsum(reachable, axis=1)), axis=1)
    return np.maximum(prefix - np.diagonal(prefix)[:, None], 0.0)


def outgoing_sums(count: int, values: Iterable[tuple[int, list[int], float]]) -> Matrix:
    """Return the matrix that has at [i, j] the sum of the weights of the values that a block of i
    to j - 1 computes and block j or a later block reads.

    A value is a triple (block that computes it, blocks that read it in ascending order, weight).
    `count` is the number of blocks.
    """
    weights = np.zeros((count, count + 1))
    for producer, readers, weight in values:
        if readers and readers[-1] > producer:
            weights[producer, readers[-1]] += weight
    read_from = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    prefix = np.concatenate((np.zeros((1, count + 1)), np.cumsum(read_from, axis=0)))
    return np.maximum(np.diagonal(prefix)[None, :] - prefix, 0.0)
