"""Exact variable elimination: FindBestStrategy (PaSE, section III-B), a whole table at a time.

Eliminating a node adds up all factors that know it and takes the least over its configurations;
what is left is a factor over its dependent set. Backwards, each node's best configuration follows
from those of its dependent set.

The order decides the work: a table has an axis for every node of a dependent set, so an elimination
costs about K^(1 + largest dependent set). Nodes of one or two neighbours leave no table larger than
a matrix, whatever the order: `reduced` takes them away before anything else, and the tables of one
of several equal layers serve all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.words import bytes_text
from autopipe.passes.solvers.min_sum.model import (
    Array,
    Assignment,
    Edge,
    MinSum,
    Once,
    blocks,
    conditioned,
    counted,
    merged,
    no_choice,
)

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
    """The graph of the nodes that have more than one configuration; the others have no
    neighbours.
    """
    free = {node for node, size in enumerate(sizes) if size > 1}
    return [near & free if node in free else set() for node, near in enumerate(around)]


def breadth_first(around: Neighbours) -> tuple[int, ...]:
    """From the first node of every component outwards."""
    order: list[int] = []
    seen: set[int] = set()
    for start in range(len(around)):
        component = [] if start in seen else [start]
        seen.add(start)
        for node in component:  # It grows meanwhile.
            component += (new := sorted(around[node] - seen))
            seen.update(new)
        order += component
    return tuple(order)


def generate_seq(around: Neighbours) -> tuple[int, ...]:
    """GenerateSeq (PaSE, section III-C): always the node whose dependent set is smallest, the first
    of equals.
    """
    return _greedy(around, lambda rest, node: len(rest[node]), lambda rest, joined: joined)


def min_fill(around: Neighbours) -> tuple[int, ...]:
    """Always the node whose elimination joins the fewest pairs of nodes that share no edge yet."""

    def fill(rest: Neighbours, node: int) -> int:
        return sum(two not in rest[one] for one, two in combinations(rest[node], 2))

    return _greedy(
        around, fill, lambda rest, joined: joined.union(*(rest[node] for node in joined))
    )


def smallest_table(around: Neighbours, sizes: Sequence[int]) -> tuple[int, ...]:
    """Always the node whose elimination leaves the smallest table, by its neighbours' numbers of
    configurations.
    """
    bits = [math.log2(size) for size in sizes]
    return _greedy(
        around,
        lambda rest, node: sum(bits[other] for other in rest[node]),
        lambda rest, joined: joined,
    )


def _greedy(
    around: Neighbours,
    score: Callable[[Neighbours, int], float],
    touched: Callable[[Neighbours, set[int]], Iterable[int]],
) -> tuple[int, ...]:
    """Take the node of least score, join its neighbours with one another, and look again at those
    `touched` by that.
    """
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
        joined = _taken(rest, node)
        for other in touched(rest, joined):
            scores[other] = score(rest, other)
            heappush(heap, (scores[other], other))
    return tuple(order)


def _taken(rest: Neighbours, node: int) -> set[int]:
    """Take a node away and join its neighbours, which are returned, with one another."""
    joined = rest[node]
    for other in joined:
        rest[other] |= joined
        rest[other] -= {node, other}
    return joined


ORDERINGS: dict[str, Callable[[Neighbours], tuple[int, ...]]] = {
    "generate_seq": generate_seq,
    "breadth_first": breadth_first,
    "min_fill": min_fill,
}


MAX_BYTES = 2 << 30
"""Of all tables together."""


class TableTooLargeError(AutopipeError):
    """The tables of an elimination would need more memory than they may."""


def size(
    around: Neighbours, configurations: Sequence[int], order: Sequence[int]
) -> tuple[int, int]:
    """Entries of all tables (8 bytes each, held until the end) and sums that are compared, for
    nodes of these numbers of configurations eliminated in this order.
    """
    rest = [set(near) for near in around]
    entries = work = 0
    for node in order:
        table = math.prod(configurations[other] for other in _taken(rest, node))
        entries += table
        work += table * configurations[node]
    return entries, work


class Factor(NamedTuple):
    """A table over the nodes of `scope`, in the order in which they are eliminated."""

    scope: tuple[int, ...]
    table: Array


def eliminate(
    model: MinSum, ordering: str = "generate_seq", max_bytes: int = MAX_BYTES
) -> Assignment:
    """The best choice, by eliminating nodes in an ordering of `ORDERINGS`. Memory is not limited.
    Raises TableTooLargeError before anything is computed where all tables need more than
    `max_bytes`; InfeasibleError where every choice is forbidden; ConfigurationError for an unknown
    ordering.
    """
    simple = conditioned(merged(model))
    if ordering not in ORDERINGS:
        raise ConfigurationError(
            f"there is no ordering {ordering!r}; there are {', '.join(ORDERINGS)}"
        )
    return counted(eliminate_in(simple, ORDERINGS[ordering](neighbours(simple)), max_bytes), model)


def eliminate_in(model: MinSum, order: tuple[int, ...], max_bytes: int = MAX_BYTES) -> Assignment:
    """The best choice of a merged model, by eliminating its nodes in this order; raises as
    `eliminate` does. A factor waits in the bucket of the first of its nodes to go. So a node's
    bucket holds all that its configuration is part of once all nodes before it are gone, and its
    dependent set is what these factors know beside it (D(i) of PaSE): by induction the least over
    the node is the least over all that went before it, too.
    """
    needed = 8 * size(neighbours(model), model.sizes, order)[0]
    if needed > max_bytes:
        # Of hundreds of operators the number is beyond all units.
        asked = bytes_text(needed) if needed < 2**70 else f"2^{needed.bit_length() - 1} B"
        raise TableTooLargeError(
            f"elimination needs {asked} of tables, more than the {bytes_text(max_bytes)} allowed; "
            "another ordering or the default solver may need less"
        )
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[Factor]] = {
        node: [Factor((node,), model.costs[node])] for node in order
    }
    for edge in model.edges:
        ahead = edge if position[edge.source] < position[edge.target] else edge.reversed
        buckets[ahead.source].append(Factor((ahead.source, ahead.target), ahead.costs))
    known: dict[tuple[object, ...], Array] = {}
    for node in order:
        scope = tuple(
            sorted(
                {n for f in buckets[node] for n in f.scope if n != node}, key=position.__getitem__
            )
        )
        if scope:
            buckets[scope[0]].append(Factor(scope, _least(buckets[node], (node, *scope), known)))
    best: dict[int, int] = {}
    for node in reversed(order):
        given = []
        for factor in buckets[node]:
            index: list[slice | int] = [slice(None), *(best[other] for other in factor.scope[1:])]
            given.append(factor.table[tuple(index)])
        best[node] = int(np.argmin(np.sum(given, axis=0)))
    choice = tuple(best[node] for node in range(len(order)))
    cost = model.cost_of(choice)
    if math.isinf(cost):
        raise no_choice()
    return Assignment(choice, cost, cost, proven=True, memory=model.memory_of(choice))


def _least(
    factors: list[Factor], axes: tuple[int, ...], known: dict[tuple[object, ...], Array]
) -> Array:
    """The least sum of the factors over the first node of `axes`, a table over the others; equal
    sums are formed once. `known` tells tables apart by where they lie: all of them are held until
    the end.
    """
    tables = []
    for factor in factors:
        lengths = dict(zip(factor.scope, factor.table.shape, strict=True))
        tables.append(factor.table.reshape([lengths.get(node, 1) for node in axes]))
    key = tuple(sorted(place(table) for table in tables))
    if key not in known:
        known[key] = summed_least(tables)
    return known[key]


def place(table: Array) -> tuple[object, ...]:
    """Where an array lies: no two that differ have the same, as long as both are held."""
    return table.ctypes.data, table.shape, table.strides, table.dtype.char


def summed_least(tables: list[Array]) -> Array:
    """The least over the first axis of the sum of tables that are broadcast against each other,
    block by block.
    """
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    tables = sorted(tables, key=lambda table: table.size)
    least = np.empty(shape[1:], np.result_type(*tables))
    inner = math.prod(shape[2:])

    def part(table: Array) -> Array:
        """These rows and this block, where the table has their axis."""
        return table[
            rows if table.shape[0] > 1 else slice(None),
            block if table.shape[1] > 1 else slice(None),
        ]

    for block in blocks(shape[1], inner):
        best = least[block]
        for rows in blocks(shape[0], inner * (block.stop - block.start)):
            total = part(tables[0])
            for table in tables[1:]:
                total = total + part(table)
            if rows.start == 0:
                np.min(total, axis=0, out=best)
            else:
                np.minimum(best, total.min(axis=0) if len(total) > 1 else total[0], out=best)
    return least


Table = TypeVar("Table")


class Contraction(Generic[Table]):
    """A merged model from which nodes of one or two neighbours are taken away, one after the other.
    What is known of a node or an edge may be any table that can be turned (axes exchanged) and
    added up.
    """

    def __init__(
        self,
        own: Iterable[Table],
        edges: Iterable[tuple[int, int, Table]],
        turn: Callable[[Table], Table],
        add: Callable[[Table, Table], Table],
    ) -> None:
        self.own = dict(enumerate(own))
        self.around: dict[int, dict[int, Table]] = {node: {} for node in self.own}
        """Of every node left: its neighbours, and tables [own configurations, theirs]."""
        self._turn = turn
        self._add = add
        for one, other, table in edges:
            self._link(one, other, table)

    def tables(self, node: int) -> list[Table]:
        """All that a node's configuration is part of: its own table, and that with each neighbour,
        ascending.
        """
        around = self.around[node]
        return [self.own[node], *(around[end] for end in sorted(around))]

    def take(self, node: int, least: Table) -> tuple[int, ...]:
        """Take a node away, whose one or two neighbours (returned, ascending) then bear `least` of
        it.
        """
        ends = tuple(sorted(self.around.pop(node)))
        del self.own[node]
        for end in ends:
            del self.around[end][node]
        if len(ends) == 1:
            self.own[ends[0]] = self._add(self.own[ends[0]], least)
        else:
            known = self.around[ends[0]].get(ends[1])
            self._link(ends[0], ends[1], least if known is None else self._add(known, least))
        return ends

    def left(self) -> tuple[tuple[int, ...], list[tuple[int, int, Table]]]:
        """The remaining nodes, and their edges by places among them."""
        nodes = tuple(self.own)
        number = {node: index for index, node in enumerate(nodes)}
        return nodes, [
            (number[node], number[other], table)
            for node in nodes
            for other, table in self.around[node].items()
            if node < other
        ]

    def _link(self, one: int, other: int, table: Table) -> None:
        self.around[one][other] = table
        self.around[other][one] = self._turn(table)


class Eliminated(NamedTuple):
    """A node that is gone, its neighbours, and its tables as `Contraction.tables` has them."""

    node: int
    ends: tuple[int, ...]
    tables: list[Array]


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
        best = dict(zip(self.nodes, choice, strict=True))
        for each in reversed(self.gone):
            seen, *matrices = each.tables
            for end, matrix in zip(each.ends, matrices, strict=True):
                seen = seen + matrix[:, best[end]]
            best[each.node] = int(np.argmin(seen))
        return tuple(best[node] for node in range(len(best)))


def reduced(model: MinSum, work: float) -> Reduction:
    """A merged model without its memory, and without the nodes of at most two neighbours. Those
    that no other has changed go first, of them the cheapest, so that equal layers stay equal as
    long as they can; all of them together take no more than `work`.
    """
    once = Once(place)
    edges = ((edge.source, edge.target, edge.costs) for edge in model.edges)
    left = Contraction(model.costs, edges, np.transpose, partial(once, np.add))

    def sums(node: int) -> int:
        return math.prod(len(left.own[other]) for other in (node, *left.around[node]))

    priority = {node: (0, sums(node)) for node in range(len(model.costs))}
    heap = [(*priority[node], node) for node in priority]
    heapify(heap)
    spent = 0
    gone: list[Eliminated] = []
    while heap:
        changes, known, node = heappop(heap)
        if priority.get(node) != (changes, known) or not 1 <= len(left.around[node]) <= 2:
            continue
        tables = left.tables(node)
        more = 0 if once.knows(_least_over_ends, *tables) else sums(node)
        if spent + more > work:
            break
        spent += more
        del priority[node]
        ends = left.take(node, once(_least_over_ends, *tables))
        gone.append(Eliminated(node, ends, tables))
        for end in ends:
            priority[end] = (max(changes, priority[end][0]) + 1, sums(end))
            heappush(heap, (*priority[end], end))
    nodes, links = left.left()
    smaller = MinSum(tuple(left.own.values()), tuple(Edge(*each) for each in links))
    return Reduction(smaller, nodes, tuple(gone), spent)


def _least_over_ends(own: Array, first: Array, second: Array | None = None) -> Array:
    """For every choice of a node's one or two ends the least sum of all that the node is part
    of.
    """
    if second is None:
        return summed_least([own[:, None], first])
    return summed_least([own[:, None, None], first[:, :, None], second[:, None, :]])
