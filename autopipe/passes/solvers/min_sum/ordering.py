"""In which order nodes are eliminated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import TypeAlias

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.solvers.min_sum.model import MinSum

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
