"""A graph as a line of blocks: the operators in one order, cut only where few bytes cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import recomputed_nodes


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes in a topological order and the places where it may be cut.

    `order[p]` is the node at place p; `cuts` are places, ascending, from 0 to the number of nodes: block b holds the
    nodes at places `cuts[b]` to `cuts[b + 1] - 1`. `block_of[node]` is its block.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    block_of: NDArray[np.int64]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.cuts) - 1

    def nodes(self, first: int, stop: int) -> tuple[int, ...]:
        """The nodes of blocks `first` to `stop - 1`, ascending."""
        return tuple(sorted(self.order[self.cuts[first] : self.cuts[stop]]))

    def by_block(self, figures: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of figures given by node, by block."""
        sums = np.zeros(self.blocks)
        np.add.at(sums, self.block_of, figures)
        return sums


@remembered(GRAPHS)
def linear_order(graph: Graph) -> tuple[int, ...]:
    """The graph's own order, with nodes that depend on no input moved down to just before their first reader.

    Such nodes (a transposed weight, a table of positions) would otherwise cross every cut above their reader.
    """
    floating: set[int] = set()
    inputs = {value.name for value in graph.inputs}
    for index, node in enumerate(graph.nodes):
        producers = [graph.producer(name) for name in node.inputs if name]
        if inputs.isdisjoint(node.inputs) and all(each is None or each in floating for each in producers):
            floating.add(index)
    order: list[int] = []
    done: set[int] = set()

    def place(index: int) -> None:
        waiting = [index]
        while waiting:
            last = waiting[-1]
            missing = [
                producer
                for name in graph.nodes[last].inputs
                if name and (producer := graph.producer(name)) in floating and producer not in done
            ]
            if missing:
                waiting.extend(producer for producer in missing if producer is not None)
                continue
            waiting.pop()
            if last not in done:
                done.add(last)
                order.append(last)

    for index in range(len(graph.nodes)):
        if index not in floating:
            place(index)
    for index in sorted(floating - done):
        place(index)
    return tuple(order)


def make_chain(
    graph: Graph, seconds: NDArray[np.float64], limit: int, groups: tuple[tuple[int, ...], ...] = ()
) -> Chain:
    """The graph as at most about `limit` blocks. `seconds` weighs each node; `groups` are cut off from the others."""
    order = linear_order(graph)
    place = np.empty(len(order), dtype=np.int64)
    place[list(order)] = np.arange(len(order))
    cuts = choose_cuts(crossing_bytes(graph, place), seconds[list(order)], limit)
    places = [place[list(group)] for group in groups]
    edges = [int(edge) for each in places for edge in (each.min(), each.max() + 1)]
    cuts = sorted({0, *cuts, *edges, len(order)})
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    starts[cuts[1:-1]] = 1
    return Chain(order, tuple(cuts), np.cumsum(starts)[place])


def crossing_bytes(graph: Graph, place: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each place p the bytes of the values produced before it and read at it or after."""
    recomputed = recomputed_nodes(graph)
    change = np.zeros(len(place) + 1)
    for name, readers in graph.consumers().items():
        producer = graph.producer(name)
        if producer is None or producer in recomputed:
            continue
        last = max((int(place[reader]) for reader in readers if reader not in recomputed), default=-1)
        if last >= 0:
            change[place[producer] + 1] += graph.type_of(name).bytes
            change[last + 1] -= graph.type_of(name).bytes
    crossing: NDArray[np.float64] = np.cumsum(change)[: len(place)]
    return crossing


def choose_cuts(crossing: NDArray[np.float64], seconds: NDArray[np.float64], limit: int) -> list[int]:
    """Places to cut: half of them spread evenly over the work, the others wherever the fewest bytes cross."""
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
    rest = [place for place in places[np.lexsort((places, crossing[places]))].tolist() if place not in chosen]
    return sorted([*chosen, *rest[: limit - len(chosen)]])
