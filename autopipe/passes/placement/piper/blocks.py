"""A graph's nodes joined into blocks that no cut parts: about a layer each, branches apart.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021), section 4,
takes layers as they come; a graph of ONNX has operators, an order of magnitude more.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Iterator

from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.analysis.chain import Blocks, values_between
from autopipe.passes.cost.roofline import Seconds

SHARE = 1 / 30  # The most of all work that nodes joined into one block may make up.
LIGHT = SHARE / 16  # A block with less of all work stands for nothing that a device could be given.


def join_nodes(graph: Graph, seconds: Seconds) -> Blocks:
    """The graph as blocks. `seconds` weighs each node. What is joined first is what exchanges most bytes, then what is
    light. Two blocks are joined where that keeps the same order: the second needs nothing but the first and what the
    first needs, or the first is light and nothing but what needs the second needs it. Nodes that every stage computes
    for itself follow the first that reads them."""
    joining = _Joining(graph, seconds)
    waiting = [joining.entry(first, second) for second in joining.members for first in joining.before[second]]
    heapq.heapify(waiting)
    while waiting:
        entry = heapq.heappop(waiting)
        _, _, first, second = entry
        if first in joining.joined or second in joining.joined or not joining.may_join(first, second):
            continue
        # As something around a pair changes it is put in again.
        if entry == joining.entry(first, second):
            joining.join(first, second)
            for changed in dict.fromkeys(joining.around(first)):
                heapq.heappush(waiting, joining.entry(*changed))
    nodes = joining.topological() or [[]]
    block_of = {node: number for number, each in enumerate(nodes) for node in each}
    consumers = graph.consumers()
    for node in sorted(joining.apart, reverse=True):
        readers = (reader for name in graph.nodes[node].outputs for reader in consumers.get(name, ()))
        block_of[node] = min((block_of[reader] for reader in readers), default=0)
        nodes[block_of[node]].append(node)
    return Blocks.of(graph, nodes)


class _Joining:
    """Blocks while they are joined; a block goes by one of its nodes."""

    def __init__(self, graph: Graph, seconds: Seconds) -> None:
        self.graph = graph
        self.apart = recomputed_nodes(graph)
        self.members = {node: [node] for node in range(len(graph.nodes)) if node not in self.apart}
        total = float(sum(seconds[node] for node in self.members)) or 1.0
        self.weight = {node: float(seconds[node]) / total for node in self.members}
        self.before, self.after = ({node: set[int]() for node in self.members} for _ in range(2))
        self.written, self.read = ({node: set[str]() for node in self.members} for _ in range(2))
        self.readers: dict[str, set[int]] = {}
        self.joined: set[int] = set()  # Blocks that others have taken in.
        for name, producer, readers in values_between(graph, {node: node for node in self.members}):
            self.readers[name] = set(readers)
            self.written[producer].add(name)
            for reader in readers:
                self.read[reader].add(name)
                self.before[reader].add(producer)
                self.after[producer].add(reader)
        self.ancestors: dict[int, int] = {}
        for node in self.members:
            above = (self.ancestors[producer] | 1 << producer for producer in self.before[node])
            self.ancestors[node] = functools.reduce(operator.or_, above, 0)

    def entry(self, first: int, second: int) -> tuple[float, float, int, int]:
        """How many bytes fewer would enter and leave the two as one, the most first; of equals the lightest."""
        saved = 0
        for name in self.read[second] & (self.written[first] | self.read[first]):
            inside = name in self.written[first] and self.readers[name] <= {first, second}
            saved += self.graph.type_of(name).bytes * (2 if inside else 1)
        return -float(saved), self.weight[first] + self.weight[second], first, second

    def may_join(self, first: int, second: int) -> bool:
        one, two = self.weight[first], self.weight[second]
        if one + two > SHARE and min(one, two) > LIGHT:
            return False
        if all(self.ancestors[first] >> other & 1 for other in self.before[second] - {first}):
            return True
        return one <= LIGHT and all(self.ancestors[other] >> second & 1 for other in self.after[first] - {second})

    def join(self, first: int, second: int) -> None:
        self.joined.add(second)
        self.members[first] += self.members.pop(second)
        self.weight[first] += self.weight.pop(second)
        for name in self.read.pop(second):
            self.readers[name] = self.readers[name] - {second} | {first}
            self.read[first].add(name)
        self.written[first] |= self.written.pop(second)
        for other in self.before.pop(second):
            self.after[other].discard(second)
            if other != first:
                self.after[other].add(first)
                self.before[first].add(other)
        for other in self.after.pop(second):
            self.before[other].discard(second)
            self.before[other].add(first)
            self.after[first].add(other)
        self.ancestors[first] = (self.ancestors[first] | self.ancestors[second]) & ~(1 << first | 1 << second)

    def around(self, block: int) -> Iterator[tuple[int, int]]:
        """The pairs of blocks whose bytes or needs change as others become part of `block`."""
        for other in sorted(self.before[block]):
            yield other, block
            for beside in sorted(self.after[other]):
                yield other, beside
        for after in sorted(self.after[block]):
            for other in sorted(self.before[after]):
                yield other, after

    def topological(self) -> list[list[int]]:
        """The nodes of each block, after all that it needs; of those that could be next the first in the graph."""
        left = {block: len(before) for block, before in self.before.items()}
        ready = [(min(self.members[block]), block) for block, count in left.items() if not count]
        heapq.heapify(ready)
        found: list[list[int]] = []
        while ready:
            _, block = heapq.heappop(ready)
            found.append(self.members[block])
            for after in self.after[block]:
                left[after] -= 1
                if not left[after]:
                    heapq.heappush(ready, (min(self.members[after]), after))
        return found
