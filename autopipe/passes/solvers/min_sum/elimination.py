"""Exact variable elimination for min-sum models: FindBestStrategy of PaSE (Elango, "PaSE:
Parallelization Strategies for Efficient DNN Training", section III-B), one table at a time.

Let v(1), ..., v(n) be the elimination order. A factor is a table over some nodes; the first factors
are the costs of nodes and edges. Eliminating v(i) adds up all factors that contain v(i) and
minimises over its configurations:

    F_i(x of D(i)) = min over x of v(i) of the sum of all factors that contain v(i)

The dependent set D(i) is the set of the other nodes of these factors, all of them later in the
order. F_i is a factor of the remaining nodes. Going through the order backwards, the best
configuration of v(i) follows from those of D(i).

With K configurations per node, an elimination takes O(K^(1 + max |D(i)|)) time per node. Nodes with
one or two neighbours never leave a table larger than a matrix. `reduced` eliminates them first, and
the tables of one of several equal layers serve all of them.

Example: in a chain a - b - c, eliminating a leaves a vector over b, eliminating b a vector over c.
The minimum of the last vector is the minimum cost.
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
    ResultCache,
    absorb_fixed_nodes,
    all_forbidden,
    index_blocks,
    merge_edges,
    recount,
)

Neighbours: TypeAlias = list[set[int]]
"""The neighbours of each node, i.e. the nodes with a common edge."""


def neighbours(model: MinSum) -> Neighbours:
    """Return the neighbours of each node of a model."""
    neighbours_of: Neighbours = [set() for _ in model.costs]
    for edge in model.edges:
        if edge.source != edge.target:
            neighbours_of[edge.source].add(edge.target)
            neighbours_of[edge.target].add(edge.source)
    return neighbours_of


def with_choice(neighbours_of: Neighbours, sizes: Sequence[int]) -> Neighbours:
    """Return the graph of the nodes with more than one configuration. The other nodes have no
    neighbours.
    """
    free = {node for node, elimination_size in enumerate(sizes) if elimination_size > 1}
    return [
        adjacent & free if node in free else set() for node, adjacent in enumerate(neighbours_of)
    ]


def breadth_first(neighbours_of: Neighbours) -> tuple[int, ...]:
    """Return the nodes in breadth-first order from the first node of each component."""
    order: list[int] = []
    seen: set[int] = set()
    for start in range(len(neighbours_of)):
        component = [] if start in seen else [start]
        seen.add(start)
        for node in component:  # The loop visits nodes that it appends.
            found = sorted(neighbours_of[node] - seen)
            component += found
            seen.update(found)
        order += component
    return tuple(order)


def generate_seq(neighbours_of: Neighbours) -> tuple[int, ...]:
    """Return the order of GenerateSeq (PaSE, section III-B): the next node is one with the smallest
    dependent set; ties go to the lowest index.
    """
    return _greedy_order(
        neighbours_of, lambda graph, node: len(graph[node]), lambda graph, connected: connected
    )


def min_fill(neighbours_of: Neighbours) -> tuple[int, ...]:
    """Return an order in which the next node is one whose elimination adds the fewest edges between
    its neighbours.
    """

    def fill(graph: Neighbours, node: int) -> int:
        return sum(two not in graph[one] for one, two in combinations(graph[node], 2))

    return _greedy_order(
        neighbours_of,
        fill,
        lambda graph, connected: connected.union(*(graph[node] for node in connected)),
    )


def smallest_table(neighbours_of: Neighbours, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return an order in which the next node is one whose elimination leaves the smallest table,
    given the numbers of configurations.
    """
    bits = [math.log2(size) for size in sizes]
    return _greedy_order(
        neighbours_of,
        lambda graph, node: sum(bits[other] for other in graph[node]),
        lambda graph, connected: connected,
    )


def _greedy_order(
    neighbours_of: Neighbours,
    score: Callable[[Neighbours, int], float],
    touched: Callable[[Neighbours, set[int]], Iterable[int]],
) -> tuple[int, ...]:
    """Return the order that repeatedly eliminates the node with the lowest score; ties go to the
    lowest index.

    `score(graph, node)` is the score of a node in the graph of the remaining nodes. Eliminating a
    node connects its neighbours with each other; `touched(graph, neighbours)` returns the nodes
    whose score may change by this.
    """
    graph = [set(adjacent) for adjacent in neighbours_of]
    scores = [score(graph, node) for node in range(len(graph))]
    heap = [(scores[node], node) for node in range(len(graph))]
    heapify(heap)
    order: list[int] = []
    is_eliminated = [False] * len(graph)
    while heap:
        known, node = heappop(heap)
        if is_eliminated[node] or known != scores[node]:
            continue
        is_eliminated[node] = True
        order.append(node)
        connected = _eliminate_from_graph(graph, node)
        for other in touched(graph, connected):
            scores[other] = score(graph, other)
            heappush(heap, (scores[other], other))
    return tuple(order)


def _eliminate_from_graph(graph: Neighbours, node: int) -> set[int]:
    """Remove a node from the graph and connect its neighbours with each other. Return the
    neighbours.
    """
    connected = graph[node]
    for other in connected:
        graph[other] |= connected
        graph[other] -= {node, other}
    return connected


ORDERINGS: dict[str, Callable[[Neighbours], tuple[int, ...]]] = {
    "generate_seq": generate_seq,
    "breadth_first": breadth_first,
    "min_fill": min_fill,
}


MAX_BYTES = 2 << 30
"""Maximum bytes of all tables of an elimination."""


class TableTooLargeError(AutopipeError):
    """The tables of an elimination need more memory than allowed."""


def elimination_size(
    neighbours_of: Neighbours, configurations: Sequence[int], order: Sequence[int]
) -> tuple[int, int]:
    """Return (entries, work) of eliminating the nodes in this order.

    - entries: number of entries of all tables, 8 bytes each, which are held until the end.
    - work: number of sums that are formed and compared.
    """
    graph = [set(adjacent) for adjacent in neighbours_of]
    entries = work = 0
    for node in order:
        table = math.prod(configurations[other] for other in _eliminate_from_graph(graph, node))
        entries += table
        work += table * configurations[node]
    return entries, work


class Factor(NamedTuple):
    """A table over the nodes `scope`, in the order of their elimination."""

    scope: tuple[int, ...]
    table: Array


def eliminate(
    model: MinSum, ordering: str = "generate_seq", max_bytes: int = MAX_BYTES
) -> Assignment:
    """Return the cheapest choice, by eliminating the nodes in one of the `ORDERINGS`. Memory is not
    limited.

    Raise TableTooLargeError, before any table is computed, if the tables need more than `max_bytes`
    in total; InfeasibleError if every choice is forbidden; ConfigurationError for an unknown
    ordering.
    """
    simple = absorb_fixed_nodes(merge_edges(model))
    if ordering not in ORDERINGS:
        raise ConfigurationError(
            f"elimination ordering {ordering!r} is unknown",
            hint=f"use one of {', '.join(ORDERINGS)}",
        )
    return recount(eliminate_in(simple, ORDERINGS[ordering](neighbours(simple)), max_bytes), model)


def eliminate_in(model: MinSum, order: tuple[int, ...], max_bytes: int = MAX_BYTES) -> Assignment:
    """Return the cheapest choice of a merged model, by eliminating its nodes in `order`. Raise the
    errors of `eliminate`.

    Each factor is stored in the bucket of the first of its nodes in `order`. When a node is next,
    its bucket therefore contains all factors with this node. By induction, minimising their sum
    over the node also minimises over all nodes before it.
    """
    needed = 8 * elimination_size(neighbours(model), model.sizes, order)[0]
    if needed > max_bytes:
        # For hundreds of operators, the number exceeds all units.
        needed_text = bytes_text(needed) if needed < 2**70 else f"2^{needed.bit_length() - 1} B"
        raise TableTooLargeError(
            f"elimination requires {needed_text} of tables, above the maximum of "
            f"{bytes_text(max_bytes)}",
            hint="use another ordering, or the default solver, which may require less memory",
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
        dependent = {other for factor in buckets[node] for other in factor.scope if other != node}
        scope = tuple(sorted(dependent, key=position.__getitem__))
        if scope:
            table = _minimum_over_first(buckets[node], (node, *scope), known)
            buckets[scope[0]].append(Factor(scope, table))
    best: dict[int, int] = {}
    for node in reversed(order):
        vectors = []
        for factor in buckets[node]:
            index: list[slice | int] = [slice(None), *(best[other] for other in factor.scope[1:])]
            vectors.append(factor.table[tuple(index)])
        best[node] = int(np.argmin(np.sum(vectors, axis=0)))
    choice = tuple(best[node] for node in range(len(order)))
    cost = model.cost_of(choice)
    if math.isinf(cost):
        raise all_forbidden()
    return Assignment(choice, cost, cost, proven=True, memory=model.memory_of(choice))


def _minimum_over_first(
    factors: list[Factor], axes: tuple[int, ...], known: dict[tuple[object, ...], Array]
) -> Array:
    """Return the minimum of the sum of the factors over the first node of `axes`, as a table over
    the others.

    `known` caches results by the memory locations of the tables, which are all held until the end.
    """
    tables = []
    for factor in factors:
        lengths = dict(zip(factor.scope, factor.table.shape, strict=True))
        tables.append(factor.table.reshape([lengths.get(node, 1) for node in axes]))
    key = tuple(sorted(memory_location(table) for table in tables))
    if key not in known:
        known[key] = minimum_of_sum(tables)
    return known[key]


def memory_location(table: Array) -> tuple[object, ...]:
    """Return (address, shape, strides, type) of an array. Different arrays that are both held have
    different results.
    """
    return table.ctypes.data, table.shape, table.strides, table.dtype.char


def minimum_of_sum(tables: list[Array]) -> Array:
    """Return the minimum over the first axis of the sum of tables, which are broadcast against each
    other. The sum is formed block by block.
    """
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    tables = sorted(tables, key=lambda table: table.size)
    minimum = np.empty(shape[1:], np.result_type(*tables))
    inner = math.prod(shape[2:])

    def current(table: Array) -> Array:
        """Return the part of `table` for the indices `rows` of axis 0 and `block` of axis 1. An
        axis of size 1 is broadcast and returned in full.
        """
        return table[
            rows if table.shape[0] > 1 else slice(None),
            block if table.shape[1] > 1 else slice(None),
        ]

    for block in index_blocks(shape[1], inner):
        best = minimum[block]
        for rows in index_blocks(shape[0], inner * (block.stop - block.start)):
            total = current(tables[0])
            for table in tables[1:]:
                total = total + current(table)
            if rows.start == 0:
                np.min(total, axis=0, out=best)
            else:
                np.minimum(best, total.min(axis=0) if len(total) > 1 else total[0], out=best)
    return minimum


Table = TypeVar("Table")


class Contraction(Generic[Table]):
    """A merged model from which nodes with one or two neighbours are eliminated one by one.

    Tables of nodes and edges may be of any type that `transpose` and `add` support.
    """

    def __init__(
        self,
        node_tables: Iterable[Table],
        edges: Iterable[tuple[int, int, Table]],
        transpose: Callable[[Table], Table],
        add: Callable[[Table, Table], Table],
    ) -> None:
        self.node_tables = dict(enumerate(node_tables))
        self.neighbours_of: dict[int, dict[int, Table]] = {node: {} for node in self.node_tables}
        """Per remaining node, the table [configurations of the node, of the neighbour] of each
        neighbour.
        """
        self._transpose = transpose
        self._add = add
        for first, second, table in edges:
            self._link(first, second, table)

    def tables(self, node: int) -> list[Table]:
        """Return the tables that contain a node: its own, then that of each neighbour by ascending
        index.
        """
        edge_tables = self.neighbours_of[node]
        return [self.node_tables[node], *(edge_tables[end] for end in sorted(edge_tables))]

    def eliminate(self, node: int, minimum: Table) -> tuple[int, ...]:
        """Remove a node, and add `minimum`, its minimum over the configurations, to its one or two
        neighbours. Return the neighbours in ascending order.
        """
        ends = tuple(sorted(self.neighbours_of.pop(node)))
        del self.node_tables[node]
        for end in ends:
            del self.neighbours_of[end][node]
        if len(ends) == 1:
            self.node_tables[ends[0]] = self._add(self.node_tables[ends[0]], minimum)
        else:
            known = self.neighbours_of[ends[0]].get(ends[1])
            self._link(ends[0], ends[1], minimum if known is None else self._add(known, minimum))
        return ends

    def remaining(self) -> tuple[tuple[int, ...], list[tuple[int, int, Table]]]:
        """Return (nodes, edges): the remaining nodes, and their edges (index, index, table) by
        position in `nodes`.
        """
        nodes = tuple(self.node_tables)
        position = {node: index for index, node in enumerate(nodes)}
        return nodes, [
            (position[node], position[other], table)
            for node in nodes
            for other, table in self.neighbours_of[node].items()
            if node < other
        ]

    def _link(self, first: int, second: int, table: Table) -> None:
        self.neighbours_of[first][second] = table
        self.neighbours_of[second][first] = self._transpose(table)


class Eliminated(NamedTuple):
    """An eliminated node."""

    node: int
    ends: tuple[int, ...]
    """Its one or two neighbours, ascending."""
    tables: list[Array]
    """Its tables, in the order of `Contraction.tables`."""


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A smaller model with the same minimum cost."""

    model: MinSum
    nodes: tuple[int, ...]
    """Index of each node in the original model."""
    eliminated: tuple[Eliminated, ...]
    """Eliminated nodes, in order."""
    work: int
    """Number of sums that were formed and compared."""

    def expanded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the choice for all original nodes that follows from a choice for the smaller
        model.
        """
        best = dict(zip(self.nodes, choice, strict=True))
        for each in reversed(self.eliminated):
            total, *matrices = each.tables
            for end, matrix in zip(each.ends, matrices, strict=True):
                total = total + matrix[:, best[end]]
            best[each.node] = int(np.argmin(total))
        return tuple(best[node] for node in range(len(best)))


def reduced(model: MinSum, work: float) -> Reduction:
    """Return a merged model reduced by eliminating nodes with at most two neighbours. Its memory is
    dropped.

    The next node is one whose tables result from the smallest number of successive eliminations,
    and of these the one with the least work, so that equal layers stay equal as long as possible.
    Elimination stops when the total work would exceed `work`.
    """
    cache = ResultCache(memory_location)
    edges = ((edge.source, edge.target, edge.costs) for edge in model.edges)
    contraction = Contraction(model.costs, edges, np.transpose, partial(cache, np.add))

    def sums(node: int) -> int:
        return math.prod(
            len(contraction.node_tables[other])
            for other in (node, *contraction.neighbours_of[node])
        )

    priority = {node: (0, sums(node)) for node in range(len(model.costs))}
    heap = [(*priority[node], node) for node in priority]
    heapify(heap)
    spent = 0
    eliminated: list[Eliminated] = []
    while heap:
        changes, known, node = heappop(heap)
        if (
            priority.get(node) != (changes, known)
            or not 1 <= len(contraction.neighbours_of[node]) <= 2
        ):
            continue
        tables = contraction.tables(node)
        needed = 0 if cache.knows(_minimum_over_node, *tables) else sums(node)
        if spent + needed > work:
            break
        spent += needed
        del priority[node]
        ends = contraction.eliminate(node, cache(_minimum_over_node, *tables))
        eliminated.append(Eliminated(node, ends, tables))
        for end in ends:
            priority[end] = (max(changes, priority[end][0]) + 1, sums(end))
            heappush(heap, (*priority[end], end))
    nodes, links = contraction.remaining()
    smaller = MinSum(tuple(contraction.node_tables.values()), tuple(Edge(*each) for each in links))
    return Reduction(smaller, nodes, tuple(eliminated), spent)


def _minimum_over_node(node_tables: Array, first: Array, second: Array | None = None) -> Array:
    """Return the minimum, over the configurations of a node, of the sum of all its tables, per
    choice of its one or two neighbours.
    """
    if second is None:
        return minimum_of_sum([node_tables[:, None], first])
    return minimum_of_sum([node_tables[:, None, None], first[:, :, None], second[:, None, :]])
