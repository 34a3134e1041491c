"""A graph as a line of blocks, cut only where few bytes cross; and sums over all ranges of its
blocks at once.

Such sums are matrices indexed by (first block, block after the last).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import recomputed_nodes


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes in a topological order and the places where it may be cut. `order[p]` is the node at
    place p; `cuts` are places, ascending, from 0 to the number of nodes: block b holds the nodes at
    places `cuts[b]` to `cuts[b + 1] - 1`. `block_of[node]` is its block.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    block_of: NDArray[np.int64]

    @property
    def blocks(self) -> int:
        return len(self.cuts) - 1

    @staticmethod
    def of(order: Sequence[int], cuts: Iterable[int]) -> Chain:
        """The chain of an order that is cut at some places, both ends among them, in any order."""
        edges = sorted(set(cuts))
        block_of = np.empty(len(order), dtype=np.int64)
        block_of[list(order)] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        return Chain(tuple(order), tuple(edges), block_of)

    def nodes(self, first: int, stop: int) -> tuple[int, ...]:
        """The nodes of blocks `first` to `stop - 1`, ascending."""
        return tuple(sorted(self.order[self.cuts[first] : self.cuts[stop]]))

    def by_block(self, figures: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of figures given by node, by block."""
        sums = np.zeros(self.blocks)
        np.add.at(sums, self.block_of, figures)
        return sums


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sets of nodes in a topological order of the blocks, and what each needs."""

    nodes: tuple[tuple[int, ...], ...]
    """The nodes of each block, ascending."""
    needs: tuple[int, ...]
    """For each block the blocks that it reads from, bit b for block b."""

    @staticmethod
    def of(graph: Graph, nodes: Sequence[Iterable[int]]) -> Blocks:
        """Blocks of these nodes, of which none reads from a following one."""
        needs = [0] * len(nodes)
        block_of = {node: block for block, each in enumerate(nodes) for node in each}
        for _, block, readers in values_between(graph, block_of):
            for reader in readers:
                needs[reader] |= 1 << block
        return Blocks(tuple(tuple(sorted(each)) for each in nodes), tuple(needs))


def input_free_nodes(graph: Graph) -> set[int]:
    """Nodes that depend on no input of the model."""
    inputs = {value.name for value in graph.inputs}
    found: set[int] = set()
    for index, (node, sources) in enumerate(zip(graph.nodes, graph.sources(), strict=True)):
        if inputs.isdisjoint(node.inputs) and found.issuperset(producer for _, producer in sources):
            found.add(index)
    return found


@remembered(GRAPHS)
def linear_order(graph: Graph) -> tuple[int, ...]:
    """The graph's own order, with nodes that depend on no input moved down to just before their
    first reader. Such nodes (a transposed weight, a table of positions) would otherwise cross every
    cut above their reader.
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
    """The graph as at most about `limit` blocks. `seconds` weighs each node; `groups` are cut off
    from the others.
    """
    order = linear_order(graph)
    place = {node: index for index, node in enumerate(order)}
    cuts = {0, *choose_cuts(crossing_bytes(graph, place), seconds[list(order)], limit), len(order)}
    for group in groups:
        places = [place[node] for node in group]
        cuts |= {min(places), max(places) + 1}
    return Chain.of(order, cuts)


def values_between(
    graph: Graph, block_of: Mapping[int, int]
) -> Iterator[tuple[str, int, list[int]]]:
    """(value, block that computes it, other blocks that read it, ascending) of all values that
    leave their block. Nodes that are in no block do not count, nor do `recomputed_nodes`: each
    block computes those for itself, and they read nothing else.
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


def crossing_bytes(graph: Graph, place: Mapping[int, int]) -> NDArray[np.float64]:
    """For each place p of a line of all nodes the bytes of the values produced before it and read
    at it or after.
    """
    change = np.zeros(len(place) + 1)
    for name, start, readers in values_between(graph, place):
        change[[start + 1, readers[-1] + 1]] += np.array([1.0, -1.0]) * graph.type_of(name).bytes
    crossing: NDArray[np.float64] = np.cumsum(change)[: len(place)]
    return crossing


def choose_cuts(
    crossing: NDArray[np.float64], seconds: NDArray[np.float64], limit: int
) -> list[int]:
    """Places to cut: half of them spread evenly over the work, the others wherever the fewest bytes
    cross.
    """
    count = len(seconds)
    if count <= limit:
        return list(range(1, count))
    done = np.cumsum(seconds) - seconds
    # Places with no work between them differ in bytes alone: keep the one with the fewest.
    share = np.floor(done / max(float(done[-1]), 1e-30) * 16 * limit)
    places = np.lexsort((np.arange(count), crossing, share))
    places = places[np.concatenate(([True], np.diff(share[places]) > 0))]
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
    """`[i, j]` = the sum of blocks i to j - 1."""
    prefix = np.concatenate(([0.0], np.cumsum(blocks)))
    return prefix[None, :] - prefix[:, None]


def range_maxima(blocks: NDArray[np.float64]) -> Matrix:
    """`[i, j]` = the largest of blocks i to j - 1; 0 for empty ranges."""
    count = len(blocks)
    found = np.zeros((count + 1, count + 1))
    for first in range(count):
        found[first, first + 1 :] = np.maximum.accumulate(blocks[first:])
    return found


def distinct_sums(count: int, items: Iterable[tuple[list[int], float]]) -> Matrix:
    """`[i, j]` = the sum over items of their weight, once, where any of an item's blocks is in i to
    j - 1. An item is (its blocks ascending, weight). Each block counts where no earlier one of the
    item is in the range.
    """
    return incoming_sums(count, ((-1, blocks, weight) for blocks, weight in items))


def incoming_sums(count: int, values: Iterable[tuple[int, list[int], float]]) -> Matrix:
    """`[i, j]` = the sum of the values that blocks before i produce and blocks i to j - 1 read,
    once each. A value is (producing block, reading blocks ascending, weight). Readers count where
    the one before is out of range.
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
    """`[i, j]` = the sum of the values that blocks i to j - 1 produce and block j or a further one
    reads, once each.
    """
    weights = np.zeros((count, count + 1))
    for producer, readers, weight in values:
        if readers and readers[-1] > producer:
            weights[producer, readers[-1]] += weight
    read_from = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    prefix = np.concatenate((np.zeros((1, count + 1)), np.cumsum(read_from, axis=0)))
    return np.maximum(np.diagonal(prefix)[None, :] - prefix, 0.0)
