"""Exact variable elimination for min-sum models: FindBestStrategy of PaSE (Elango, "PaSE:
Parallelization Strategies for Efficient DNN Training", section III-B), one table at a time.

Let v(1), ..., v(n) be the elimination order. A factor is a table over some nodes; the first factors
are the costs of nodes and edges. Eliminating v(i) adds up all factors that contain v(i) and
minimises over its configurations:

    F_i(x of D(i)) = min over x of v(i) of the sum of all factors that contain v(i)

The dependent set D(i) is the set of the other nodes of these factors, all of them later in the
order. F_i is a factor of the remaining nodes. Going through the order backwards, the best
configuration of v(i) follows from those of D(i).

With K configurations per node, an elimination takes O(K^(1 + max |D(i)|)) time per node. The
elimination of a node with one or two neighbours leaves a vector or a matrix. `reduce_model`
eliminates such nodes first, and computes the tables of several equal layers once.

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
    all_forbidden_error,
    index_blocks,
    merge_edges,
    with_recomputed_cost,
)

Neighbours: TypeAlias = list[set[int]]
"""A graph: for each node, its neighbours, which are the nodes with a common edge."""


def neighbours(model: MinSum) -> Neighbours:
    """Return the neighbours of each node of `model`: the nodes with which it has an edge."""
    neighbours_of: Neighbours = [set() for _ in model.costs]
    for edge in model.edges:
        if edge.source != edge.target:
            neighbours_of[edge.source].add(edge.target)
            neighbours_of[edge.target].add(edge.source)
    return neighbours_of


def undecided_graph(neighbours_of: Neighbours, sizes: Sequence[int]) -> Neighbours:
    """Return the graph without the edges of nodes that have a single configuration. `sizes`
    contains the number of configurations of each node.
    """
    free = {node for node, elimination_size in enumerate(sizes) if elimination_size > 1}
    return [
        adjacent & free if node in free else set() for node, adjacent in enumerate(neighbours_of)
    ]


def breadth_first_order(neighbours_of: Neighbours) -> tuple[int, ...]:
    """Return the nodes in breadth-first order, which starts at the node with the lowest index of
    each connected component.
    """
    order: list[int] = []
    seen: set[int] = set()
    for start in range(len(neighbours_of)):
        component = [] if start in seen else [start]
        seen.add(start)
        for node in component:  # The loop also visits the nodes that it appends to `component`.
            found = sorted(neighbours_of[node] - seen)
            component += found
            seen.update(found)
        order += component
    return tuple(order)


def generate_seq_order(neighbours_of: Neighbours) -> tuple[int, ...]:
    """Return the elimination order of GenerateSeq (PaSE, section III-B): the next node is the one
    with the fewest neighbours among the remaining nodes (the smallest dependent set); ties go to
    the lowest index.
    """
    return _greedy_order(
        neighbours_of, lambda graph, node: len(graph[node]), lambda graph, connected: connected
    )


def min_fill_order(neighbours_of: Neighbours) -> tuple[int, ...]:
    """Return an elimination order in which the next node is the one whose elimination adds the
    fewest edges between its neighbours; ties go to the lowest index.
    """

    def missing_edges(graph: Neighbours, node: int) -> int:
        """Return the number of pairs of neighbours of `node` that have no edge."""
        return sum(two not in graph[one] for one, two in combinations(graph[node], 2))

    return _greedy_order(
        neighbours_of,
        missing_edges,
        lambda graph, connected: connected.union(*(graph[node] for node in connected)),
    )


def smallest_table_order(neighbours_of: Neighbours, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return an elimination order in which the next node is the one whose elimination leaves the
    smallest table; ties go to the lowest index. `sizes` contains the number of configurations of
    each node.
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
    """Return the elimination order in which the next node is the one with the lowest score; ties go
    to the lowest index.

    `score(graph, node)` returns the score of a node in the graph of the remaining nodes. An
    elimination connects the neighbours of the eliminated node with each other;
    `touched(graph, neighbours)` then returns the nodes whose score may have changed.
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
    """Change `graph`: remove the edges of `node` and connect its neighbours with each other. Return
    the neighbours.
    """
    connected = graph[node]
    for other in connected:
        graph[other] |= connected
        graph[other] -= {node, other}
    return connected


ORDERINGS: dict[str, Callable[[Neighbours], tuple[int, ...]]] = {
    "generate_seq": generate_seq_order,
    "breadth_first": breadth_first_order,
    "min_fill": min_fill_order,
}


MAX_BYTES = 2 << 30
"""Maximum bytes of all tables of an elimination."""


class TableTooLargeError(AutopipeError):
    """The tables of an elimination need more memory than allowed."""


def elimination_size(
    neighbours_of: Neighbours, configurations: Sequence[int], order: Sequence[int]
) -> tuple[int, int]:
    """Return (entries, work) of an elimination of all nodes in the order `order`.

    - entries: number of entries of all tables together. An entry has 8 bytes, and all tables stay
      in memory until the end.
    - work: number of sums that are formed and compared.

    `configurations` contains the number of configurations of each node.
    """
    graph = [set(adjacent) for adjacent in neighbours_of]
    entries = work = 0
    for node in order:
        table = math.prod(configurations[other] for other in _eliminate_from_graph(graph, node))
        entries += table
        work += table * configurations[node]
    return entries, work


class Factor(NamedTuple):
    """A table of costs with one axis per node of `scope`, in the order in which these nodes are
    eliminated. Its indices are configurations of the nodes.
    """

    scope: tuple[int, ...]
    table: Array


def eliminate(
    model: MinSum, ordering: str = "generate_seq", max_bytes: int = MAX_BYTES
) -> Assignment:
    """Return the cheapest choice of `model`, without a memory limit, by eliminating the nodes in
    the order of `ORDERINGS[ordering]`.

    Raise TableTooLargeError, before any table is computed, if the tables need more than `max_bytes`
    bytes in total. Raise InfeasibleError if every choice is forbidden, and ConfigurationError for
    an unknown ordering.
    """
    simple = absorb_fixed_nodes(merge_edges(model))
    if ordering not in ORDERINGS:
        raise ConfigurationError(
            f"elimination ordering {ordering!r} is unknown",
            hint=f"use one of {', '.join(ORDERINGS)}",
        )
    return with_recomputed_cost(
        eliminate_in_order(simple, ORDERINGS[ordering](neighbours(simple)), max_bytes), model
    )


def eliminate_in_order(
    model: MinSum, order: tuple[int, ...], max_bytes: int = MAX_BYTES
) -> Assignment:
    """Return the cheapest choice of a model with at most one edge between two nodes, by eliminating
    its nodes in the order `order`.

    Each node has a bucket, a list of factors. A factor is stored in the bucket of the first of its
    nodes in `order`. When a node is eliminated, its bucket therefore contains all remaining factors
    with this node. By induction, the minimum of their sum over the node is also the minimum over
    all nodes that were eliminated before and contribute to them.

    Raise TableTooLargeError, before any table is computed, if the tables need more than `max_bytes`
    bytes in total, and InfeasibleError if every choice is forbidden.
    """
    needed = 8 * elimination_size(neighbours(model), model.sizes, order)[0]
    if needed > max_bytes:
        # With hundreds of operators, the number of bytes can be too large for `bytes_text`. The
        # error then states a power of 2.
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
        raise all_forbidden_error()
    return Assignment(choice, cost, cost, proven=True, memory=model.memory_of(choice))


def _minimum_over_first(
    factors: list[Factor], axes: tuple[int, ...], known: dict[tuple[object, ...], Array]
) -> Array:
    """Return the minimum over the first node of `axes` of the sum of `factors`, as a table over the
    other nodes of `axes`.

    `known` caches results by the memory locations of the factors' tables. The locations stay valid
    because all tables stay in memory until the end of the elimination.
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
    """Return (address, shape, strides, type) of an array. The results of two arrays in memory are
    equal only if both are views of the same data.
    """
    return table.ctypes.data, table.shape, table.strides, table.dtype.char


def minimum_of_sum(tables: list[Array]) -> Array:
    """Return the minimum over the first axis of the sum of `tables`, which are broadcast to a
    common shape. The sum is formed in blocks that fit in the CPU cache.
    """
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    tables = sorted(tables, key=lambda table: table.size)
    minimum = np.empty(shape[1:], np.result_type(*tables))
    inner = math.prod(shape[2:])

    def current_part(table: Array) -> Array:
        """Return the part of `table` at the indices `rows` of axis 0 and `block` of axis 1, which
        the loops below set. An axis of size 1 is broadcast, so it is returned in full.
        """
        return table[
            rows if table.shape[0] > 1 else slice(None),
            block if table.shape[1] > 1 else slice(None),
        ]

    for block in index_blocks(shape[1], inner):
        best = minimum[block]
        for rows in index_blocks(shape[0], inner * (block.stop - block.start)):
            total = current_part(tables[0])
            for table in tables[1:]:
                total = total + current_part(table)
            if rows.start == 0:
                np.min(total, axis=0, out=best)
            else:
                np.minimum(best, total.min(axis=0) if len(total) > 1 else total[0], out=best)
    return minimum


Table = TypeVar("Table")


class Contraction(Generic[Table]):
    """The state of an elimination of nodes with one or two neighbours from a model: the remaining
    nodes and edges, with their tables of costs. There is at most one edge between two nodes.

    Tables may be of any type; the function `transpose` exchanges the two nodes of an edge's table,
    and the function `add` adds two tables.
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
        """Per remaining node: by neighbour, the table of their edge, of shape [configurations of
        the node, configurations of the neighbour].
        """
        self._transpose = transpose
        self._add = add
        for first, second, table in edges:
            self._link(first, second, table)

    def tables(self, node: int) -> list[Table]:
        """Return the table of the node `node`, then the tables of its edges by ascending index of
        the neighbour.
        """
        edge_tables = self.neighbours_of[node]
        return [self.node_tables[node], *(edge_tables[end] for end in sorted(edge_tables))]

    def eliminate(self, node: int, minimum: Table) -> tuple[int, ...]:
        """Remove the node `node`, and return its one or two neighbours in ascending order.

        `minimum` is the minimum, over the configurations of the node, of the sum of its tables. It
        is added to the table of the only neighbour, or to the table of the edge between both
        neighbours.
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
        """Return (nodes, edges): the remaining nodes, and triples (node, node, table) of their
        edges. Nodes of an edge are given by their positions in `nodes`.
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
        """Set the table of the edge between two nodes; its first axis belongs to `first`."""
        self.neighbours_of[first][second] = table
        self.neighbours_of[second][first] = self._transpose(table)


class Eliminated(NamedTuple):
    """An eliminated node, with all that determines its configuration once its neighbours have
    theirs.
    """

    node: int
    ends: tuple[int, ...]
    """The one or two neighbours of the node at its elimination, ascending."""
    tables: list[Array]
    """The tables of the node at its elimination, in the order of `Contraction.tables`."""


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A smaller model whose minimum cost equals that of the original model."""

    model: MinSum
    """The smaller model."""
    nodes: tuple[int, ...]
    """For each node of the smaller model, its index in the original model."""
    eliminated: tuple[Eliminated, ...]
    """Nodes of the original model that were eliminated, in the order of their elimination."""
    work: int
    """Number of sums that were formed and compared for the reduction."""

    def expand_choice(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the cheapest choice for the original model that agrees with `choice`, a choice for
        the smaller model.
        """
        best = dict(zip(self.nodes, choice, strict=True))
        for each in reversed(self.eliminated):
            total, *matrices = each.tables
            for end, matrix in zip(each.ends, matrices, strict=True):
                total = total + matrix[:, best[end]]
            best[each.node] = int(np.argmin(total))
        return tuple(best[node] for node in range(len(best)))


def reduce_model(model: MinSum, work: float) -> Reduction:
    """Return a smaller model with an equal minimum cost: nodes with one or two neighbours are
    eliminated from `model`, which has at most one edge between two nodes. The smaller model has no
    memory.

    The next node is one whose tables result from the fewest successive eliminations, and among
    these the one with the least work. So equal layers stay equal as long as possible, and their
    tables are computed once. Elimination stops before the total work exceeds `work`, a number of
    sums.
    """
    cache = ResultCache(memory_location)
    edges = ((edge.source, edge.target, edge.costs) for edge in model.edges)
    contraction = Contraction(model.costs, edges, np.transpose, partial(cache, np.add))

    def sum_count(node: int) -> int:
        """Return the number of sums that the elimination of `node` would form."""
        return math.prod(
            len(contraction.node_tables[other])
            for other in (node, *contraction.neighbours_of[node])
        )

    priority = {node: (0, sum_count(node)) for node in range(len(model.costs))}
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
        needed = 0 if cache.knows(_minimum_over_node, *tables) else sum_count(node)
        if spent + needed > work:
            break
        spent += needed
        del priority[node]
        ends = contraction.eliminate(node, cache(_minimum_over_node, *tables))
        eliminated.append(Eliminated(node, ends, tables))
        for end in ends:
            priority[end] = (max(changes, priority[end][0]) + 1, sum_count(end))
            heappush(heap, (*priority[end], end))
    nodes, links = contraction.remaining()
    smaller = MinSum(tuple(contraction.node_tables.values()), tuple(Edge(*each) for each in links))
    return Reduction(smaller, nodes, tuple(eliminated), spent)


def _minimum_over_node(node_tables: Array, first: Array, second: Array | None = None) -> Array:
    """Return, for each configuration of one neighbour or pair of configurations of two neighbours,
    the minimum over the configurations of a node of the sum of its tables.

    `node_tables` are the node's own costs. `first` and `second` are the tables of its edges, with
    the node as first axis; `second` is None if the node has one neighbour.
    """
    if second is None:
        return minimum_of_sum([node_tables[:, None], first])
    return minimum_of_sum([node_tables[:, None, None], first[:, :, None], second[:, None, :]])
