"""Parts of a model that may run side by side: an image encoder and a text encoder, the towers of a recommender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import Graph

HEAVY = 1e-3
"""Share of all operations from which a node counts when paths are compared."""
TRUNK = 0.05
"""A node is on the trunk where less than this share of all operations may run beside it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A connected part of a graph beside which others may run."""

    first: str
    """Name of its first node."""
    nodes: int
    flops: float


def branches_of(graph: Graph, flops: Sequence[float]) -> tuple[Branch, ...]:
    """The largest set of branches that are independent of one another, in topological order; () for a chain.

    `flops` are the operations of each node. A branch is a connected part off the trunk with a share of at least
    `TRUNK` of all operations; heads of one attention, or its three projections, are less unless the model is small.
    """
    total = sum(flops)
    heavy = [index for index, count in enumerate(flops) if total and count >= HEAVY * total]
    if len(heavy) < 2:
        return ()
    before, after = _reached(graph, heavy), _reached(graph, heavy, backwards=True)
    weights = np.asarray([flops[index] for index in heavy])
    beside = weights.sum() - (before | after) @ weights
    parts = _parts(graph, [index for index in range(len(graph.nodes)) if beside[index] >= TRUNK * total])
    positions = {index: position for position, index in enumerate(heavy)}
    found: list[tuple[Branch, list[int]]] = []
    for nodes in parts:
        work = sum(flops[index] for index in nodes)
        inside = [positions[index] for index in nodes if index in positions]
        if work < TRUNK * total or not inside:
            continue
        ordered = any(before[[heavy[other] for other in others]][:, inside].any() for _, others in found)
        ordered = ordered or any(before[[heavy[each] for each in inside]][:, others].any() for _, others in found)
        if not ordered:
            found.append((Branch(graph.nodes[nodes[0]].name, len(nodes), work), inside))
    return tuple(branch for branch, _ in found) if len(found) > 1 else ()


def _reached(graph: Graph, heavy: list[int], backwards: bool = False) -> np.ndarray:
    """[nodes, heavy nodes]: which heavy nodes lie before (or after) each node, itself included."""
    table = np.zeros((len(graph.nodes), len(heavy)), dtype=bool)
    for position, index in enumerate(heavy):
        table[index, position] = True
    order = range(len(graph.nodes))
    for index in reversed(order) if backwards else order:
        for name in graph.nodes[index].inputs:
            source = graph.producer(name) if name else None
            if source is not None:
                if backwards:
                    table[source] |= table[index]
                else:
                    table[index] |= table[source]
    return table


def _parts(graph: Graph, nodes: list[int]) -> list[list[int]]:
    """The connected components of these nodes, each ascending, in order of their first nodes."""
    leader = {index: index for index in nodes}

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for index in nodes:
        for name in graph.nodes[index].inputs:
            source = graph.producer(name) if name else None
            if source is not None and source in leader:
                leader[find(index)] = find(source)
    parts: dict[int, list[int]] = {}
    for index in nodes:
        parts.setdefault(find(index), []).append(index)
    return list(parts.values())
