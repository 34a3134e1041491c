"""Exact variable elimination: FindBestStrategy (PaSE, section III-B), a whole table at a time.

Eliminating a node adds up all factors that know it and takes the least over its configurations; what is left is a
factor over its dependent set. Backwards, each node's best configuration follows from those of its dependent set.

Nodes of at most two neighbours are eliminated before anything else; what is left is a smaller model.

In a network most operators lie on a way between two others. Where layers repeat, the tables of one serve all of them,
as long as nothing has told the layers apart; and bounds of what is left are closer.

In which order nodes are eliminated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from autopipe.ir.errors import AutopipeError, ConfigurationError, InfeasibleError
from autopipe.passes.solvers.min_sum.model import Array, Assignment, Edge, MinSum, blocks, conditioned, counted, merged

Neighbours: TypeAlias = list[set[int]]
"""Of every node: the nodes it shares an edge with."""


def neighbours(model: MinSum) -> Neighbours:
    """The model's graph."""
    around: Neighbours = [set() for _ in model.costs]
    for edge in model.edges:
        if edge.source != edge.target:
            around[edge.source].add(edge.target)
            around[edge.target].add(edge.source)
    return around


def with_choice(around: Neighbours, sizes: Sequence[int]) -> Neighbours:
    """The graph of the nodes that have more than one configuration; the others have no neighbours."""
    free = {node for node, size in enumerate(sizes) if size > 1}
    return [near & free if node in free else set() for node, near in enumerate(around)]


def breadth_first(around: Neighbours) -> tuple[int, ...]:
    """From the first node of every component outwards."""
    order: list[int] = []
    seen: set[int] = set()
    for start in range(len(around)):
        if start in seen:
            continue
        seen.add(start)
        reached = len(order)
        order.append(start)
        while reached < len(order):
            new = sorted(around[order[reached]] - seen)
            seen.update(new)
            order += new
            reached += 1
    return tuple(order)


def generate_seq(around: Neighbours) -> tuple[int, ...]:
    """GenerateSeq (PaSE, section III-C): always the node whose dependent set is smallest, the first of equals."""
    return _greedy(around, lambda rest, node: len(rest[node]), lambda rest, joined: joined)


def min_fill(around: Neighbours) -> tuple[int, ...]:
    """Always the node whose elimination joins the fewest pairs of nodes that share no edge yet."""

    def fill(rest: Neighbours, node: int) -> int:
        return sum(two not in rest[one] for one, two in combinations(rest[node], 2))

    return _greedy(around, fill, lambda rest, joined: joined.union(*(rest[node] for node in joined)))


def smallest_table(around: Neighbours, sizes: Sequence[int]) -> tuple[int, ...]:
    """Always the node whose elimination leaves the smallest table, by its neighbours' numbers of configurations."""
    bits = [math.log2(size) for size in sizes]
    return _greedy(around, lambda rest, node: sum(bits[other] for other in rest[node]), lambda rest, joined: joined)


def _greedy(
    around: Neighbours,
    score: Callable[[Neighbours, int], float],
    touched: Callable[[Neighbours, set[int]], Iterable[int]],
) -> tuple[int, ...]:
    """Take the node of least score, join its neighbours with one another, and look again at those `touched` by that."""
    rest = [set(near) for near in around]
    scores = [score(rest, node) for node in range(len(rest))]
    heap = [(scores[node], node) for node in range(len(rest))]
    heapify(heap)
    order: list[int] = []
    gone = [False] * len(rest)
    while heap:
        known, node = heappop(heap)
        if gone[node] or known != scores[node]:
            continue
        gone[node] = True
        order.append(node)
        joined = rest[node]
        for other in joined:
            rest[other] |= joined
            rest[other] -= {node, other}
        for other in touched(rest, joined):
            scores[other] = score(rest, other)
            heappush(heap, (scores[other], other))
    return tuple(order)


ORDERINGS: dict[str, Callable[[Neighbours], tuple[int, ...]]] = {
    "generate_seq": generate_seq,
    "breadth_first": breadth_first,
    "min_fill": min_fill,
}


def sequence(model: MinSum, ordering: str) -> tuple[int, ...]:
    """All nodes in the order of that name. Raises ConfigurationError for a name that is none."""
    if ordering not in ORDERINGS:
        raise ConfigurationError(f"there is no ordering {ordering!r}; there are {', '.join(ORDERINGS)}")
    return ORDERINGS[ordering](neighbours(model))


MAX_BYTES = 2 << 30
"""Of all tables together."""


class TableTooLargeError(AutopipeError):
    """The tables of an elimination would need more memory than they may."""


@dataclass(frozen=True, slots=True)
class Size:
    """Work and memory of an elimination."""

    entries: int
    """Of all tables: 8 bytes each, held until the end."""
    work: int
    """Sums that are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table over some nodes."""

    scope: tuple[int, ...]
    """In the order in which they are eliminated."""
    table: Array


def size(around: Neighbours, configurations: Sequence[int], order: Sequence[int]) -> Size:
    """Work and memory of eliminating nodes of these numbers of configurations in this order."""
    rest = [set(near) for near in around]
    entries = work = 0
    for node in order:
        joined = rest[node]
        table = math.prod(configurations[other] for other in joined)
        entries += table
        work += table * configurations[node]
        for other in joined:
            rest[other] |= joined
            rest[other] -= {node, other}
    return Size(entries, work)


def eliminate(model: MinSum, ordering: str = "generate_seq", max_bytes: int = MAX_BYTES) -> Assignment:
    """The best choice, by eliminating nodes in an ordering of `ordering.ORDERINGS`. Memory is not limited.

    Raises TableTooLargeError before anything is computed where all tables need more than `max_bytes`; InfeasibleError
    where every choice is forbidden; ConfigurationError for an unknown ordering.
    """
    simple = conditioned(merged(model))
    return counted(eliminate_in(simple, sequence(simple, ordering), max_bytes), model)


def eliminate_in(model: MinSum, order: tuple[int, ...], max_bytes: int = MAX_BYTES) -> Assignment:
    """The best choice of a merged model, by eliminating its nodes in this order; raises as `eliminate` does."""
    needed = 8 * size(neighbours(model), [len(costs) for costs in model.costs], order).entries
    if needed > max_bytes:
        # Of hundreds of operators the number is too large for a float.
        asked = f"{needed / 2**30:.3g}" if needed < 2**1000 else f"2^{needed.bit_length() - 31} or more"
        raise TableTooLargeError(
            f"elimination needs {asked} GiB of tables, more than the {max_bytes / 2**30:.3g} GiB allowed; "
            "another ordering or the default solver may need less"
        )
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[Factor]] = {node: [Factor((node,), model.costs[node])] for node in order}
    for edge in model.edges:
        if position[edge.source] < position[edge.target]:
            buckets[edge.source].append(Factor((edge.source, edge.target), edge.costs))
        else:
            buckets[edge.target].append(Factor((edge.target, edge.source), edge.costs.T))
    known: dict[tuple[object, ...], Array] = {}
    for node in order:
        scope = tuple(sorted({n for f in buckets[node] for n in f.scope if n != node}, key=position.__getitem__))
        if scope:
            buckets[scope[0]].append(Factor(scope, _least(buckets[node], node, scope, known)))
    choice = _choose(buckets, order)
    cost = model.cost_of(choice)
    if math.isinf(cost):
        raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
    return Assignment(choice, cost, cost, proven=True, memory=model.memory_of(choice))


def _choose(buckets: dict[int, list[Factor]], order: tuple[int, ...]) -> tuple[int, ...]:
    """Every node's best configuration, those of its dependent set being chosen before it."""
    chosen: dict[int, int] = {}
    for node in reversed(order):
        sums = np.sum([_given(factor, chosen) for factor in buckets[node]], axis=0)
        chosen[node] = int(np.argmin(sums))
    return tuple(chosen[node] for node in range(len(order)))


def _given(factor: Factor, chosen: dict[int, int]) -> Array:
    """The factor over its first node alone, the others being chosen."""
    table = factor.table
    for other in reversed(factor.scope[1:]):
        table = table[..., chosen[other]]
    return table


def _least(factors: list[Factor], node: int, scope: tuple[int, ...], known: dict[tuple[object, ...], Array]) -> Array:
    """The least sum of the factors over the node's configurations, a table over `scope`; equal sums are formed once.

    `known` tells tables apart by where they lie: all of them are held until the end.
    """
    axes = {other: axis for axis, other in enumerate((node, *scope))}
    tables = [_spread(factor, axes) for factor in factors]
    key = tuple(sorted(place(table) for table in tables))
    if key not in known:
        known[key] = summed_least(tables)
    return known[key]


def _spread(factor: Factor, axes: dict[int, int]) -> Array:
    """The factor's table with an axis for each of `axes`, of length 1 where it does not know the node."""
    shape = [1] * len(axes)
    for other, length in zip(factor.scope, factor.table.shape, strict=True):
        shape[axes[other]] = length
    return factor.table.reshape(shape)


def place(table: Array) -> tuple[object, ...]:
    """Where an array lies: no two that differ have the same, as long as both are held."""
    return table.ctypes.data, table.shape, table.strides, table.dtype.char


def summed_least(tables: list[Array]) -> Array:
    """The least over the first axis of the sum of tables that are broadcast against each other."""
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    tables = sorted(tables, key=lambda table: table.size)
    least = np.empty(shape[1:], np.result_type(*tables))
    inner = math.prod(shape[2:])
    for block in blocks(shape[1], inner):
        best = least[block]
        for rows in blocks(shape[0], inner * (block.stop - block.start)):
            total = _part(tables[0], rows, block)
            for table in tables[1:]:
                total = total + _part(table, rows, block)
            if rows.start == 0:
                np.min(total, axis=0, out=best)
            else:
                np.minimum(best, total.min(axis=0) if len(total) > 1 else total[0], out=best)
    return least


def _part(table: Array, rows: slice, block: slice) -> Array:
    """Some indices of the first two axes, where the table has them."""
    return table[rows if table.shape[0] > 1 else slice(None), block if table.shape[1] > 1 else slice(None)]


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
