"""Nodes of at most two neighbours are eliminated before anything else; what is left is a smaller model.

In a network most operators lie on a way between two others. Where layers repeat, the tables of one serve all of them,
as long as nothing has told the layers apart; and bounds of what is left are closer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import itemgetter

import numpy as np

from autopipe.passes.solvers.min_sum.elimination import place, summed_least
from autopipe.passes.solvers.min_sum.model import Array, Edge, MinSum


@dataclass(frozen=True, slots=True, eq=False)
class Eliminated:
    """A node that is gone, and what it knew."""

    node: int
    costs: Array
    around: tuple[tuple[int, Array], ...]
    """Neighbours, and matrices [own configurations, theirs]."""


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A smaller model; its least cost is the same."""

    model: MinSum
    nodes: tuple[int, ...]
    """Of the model's nodes: those that they were."""
    gone: tuple[Eliminated, ...]
    """In the order in which they went."""
    work: int
    """Sums that were compared."""

    def expanded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice for all nodes that follows from one for the model's."""
        chosen = dict(zip(self.nodes, choice, strict=True))
        for each in reversed(self.gone):
            seen = each.costs
            for other, matrix in each.around:
                seen = seen + matrix[:, chosen[other]]
            chosen[each.node] = int(np.argmin(seen))
        return tuple(chosen[node] for node in range(len(chosen)))


def reduced(model: MinSum, work: float) -> Reduction:
    """A merged model without its memory, and without the nodes of at most two neighbours.

    Those that no other has changed go first, of them the cheapest, so that equal layers stay equal as long as they can;
    all of them together take no more than `work`.
    """
    reducer = _Reducer(model)
    turn = {node: (0, reducer.work(node)) for node in range(len(model.costs))}
    heap = [(*turn[node], node) for node in turn]
    heapify(heap)
    spent = 0
    gone: list[Eliminated] = []
    while heap:
        changes, known, node = heappop(heap)
        if turn.get(node) != (changes, known) or not 1 <= len(reducer.around[node]) <= 2:
            continue
        more = reducer.new_work(node)
        if spent + more > work:
            break
        spent += more
        del turn[node]
        each = reducer.eliminate(node)
        gone.append(each)
        for other, _ in each.around:
            turn[other] = (max(changes, turn[other][0]) + 1, reducer.work(other))
            heappush(heap, (*turn[other], other))
    return Reduction(*reducer.left(), tuple(gone), spent)


class _Reducer:
    """A model on its way; equal sums are formed once."""

    def __init__(self, model: MinSum) -> None:
        self.costs = dict(enumerate(model.costs))
        self.around: dict[int, dict[int, Array]] = {node: {} for node in self.costs}
        """Of every node left: its neighbours, and matrices [own configurations, theirs]."""
        self._known: dict[Hashable, tuple[list[Array], Array]] = {}
        """Sums by what was added, which is held so that its place stays its own."""
        for edge in model.edges:
            self._link(edge.source, edge.target, edge.costs)

    def work(self, node: int) -> int:
        """Sums to be compared when a node goes."""
        return math.prod(len(self.costs[other]) for other in (node, *self.around[node]))

    def new_work(self, node: int) -> int:
        """The same, none where they have been formed for another."""
        return 0 if _key(self._tables(node)) in self._known else self.work(node)

    def eliminate(self, node: int) -> Eliminated:
        """Take a node of one or two neighbours away."""
        least = self._formed(self._tables(node), summed_least)
        each = Eliminated(node, self.costs.pop(node), tuple(sorted(self.around.pop(node).items(), key=itemgetter(0))))
        ends = [other for other, _ in each.around]
        for other in ends:
            del self.around[other][node]
        if len(ends) == 1:
            self.costs[ends[0]] = self._formed([self.costs[ends[0]], least], _both)
        else:
            known = self.around[ends[0]].get(ends[1])
            self._link(ends[0], ends[1], least if known is None else self._formed([known, least], _both))
        return each

    def left(self) -> tuple[MinSum, tuple[int, ...]]:
        """The remaining model, and its nodes."""
        nodes = tuple(self.costs)
        number = {node: index for index, node in enumerate(nodes)}
        edges = [
            Edge(number[node], number[other], matrix)
            for node in nodes
            for other, matrix in self.around[node].items()
            if node < other
        ]
        return MinSum(tuple(self.costs.values()), tuple(edges)), nodes

    def _link(self, one: int, other: int, matrix: Array) -> None:
        self.around[one][other] = matrix
        self.around[other][one] = matrix.T

    def _tables(self, node: int) -> list[Array]:
        """Tables that a node's elimination adds up, an axis for the node and one for each neighbour in order."""
        tables = [self.costs[node]] + [matrix for _, matrix in sorted(self.around[node].items(), key=itemgetter(0))]
        if len(tables) == 2:
            return [tables[0][:, None], tables[1]]
        return [tables[0][:, None, None], tables[1][:, :, None], tables[2][:, None, :]]

    def _formed(self, tables: list[Array], form: Callable[[list[Array]], Array]) -> Array:
        key = _key(tables)
        if key not in self._known:
            self._known[key] = tables, form(tables)
        return self._known[key][1]


def _both(tables: list[Array]) -> Array:
    total: Array = tables[0] + tables[1]
    return total


def _key(tables: list[Array]) -> Hashable:
    return tuple(place(table) for table in tables)
