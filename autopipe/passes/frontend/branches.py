"""Search for branches of a graph that can run in parallel, for example the towers of a multi-modal
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import Graph

MIN_NODE_WORK = 1e-3
"""Minimum work of a node, as a fraction of the graph's operations. Nodes with less work are ignored
in the sum of the work that can run in parallel with a node.
"""
MIN_PARALLEL_WORK = 0.05
"""Minimum work of a branch, as a fraction of the graph's operations. It is also the minimum work
that can run in parallel with each node of a branch.
"""


@dataclass(frozen=True, slots=True)
class Branch:
    """A connected part of a graph that can run in parallel with other branches."""

    first: str
    """Name of the first node of the branch in the graph's order."""
    nodes: int
    """Number of nodes of the branch."""
    flops: float


def find_branches(graph: Graph, flops: Sequence[float]) -> tuple[Branch, ...]:
    """Return the branches of a graph that can run in parallel with each other, in the order of
    their first nodes; () if there are fewer than two.

    `flops[i]` is the number of operations of node i. Two nodes can run in parallel if neither
    depends on the other. A node is a candidate if the nodes that can run in parallel with it have
    at least `MIN_PARALLEL_WORK` of all operations. A branch is a connected component of the
    candidates that has at least `MIN_PARALLEL_WORK` of all operations. The heads of an attention
    layer, and its three projections, have less work than that, except in small models. A component
    is skipped if it depends on a branch that was accepted before it, or if that branch depends on
    the component.
    """
    total = sum(flops)
    heavy = [index for index, count in enumerate(flops) if total and count >= MIN_NODE_WORK * total]
    if len(heavy) < 2:
        return ()
    before = _heavy_dependencies(graph, heavy)
    after = _heavy_dependencies(graph, heavy, backwards=True)
    weights = np.asarray([flops[index] for index in heavy])
    parallel = weights.sum() - (before | after) @ weights
    positions = {index: position for position, index in enumerate(heavy)}
    found: list[tuple[Branch, list[int]]] = []
    for nodes in _connected_components(
        graph,
        [
            index
            for index in range(len(graph.nodes))
            if parallel[index] >= MIN_PARALLEL_WORK * total
        ],
    ):
        work = sum(flops[index] for index in nodes)
        inside = [positions[index] for index in nodes if index in positions]
        if work < MIN_PARALLEL_WORK * total or not inside:
            continue
        pairs = [pair for _, others in found for pair in ((inside, others), (others, inside))]
        if not any(before[[heavy[each] for each in last]][:, first].any() for first, last in pairs):
            found.append((Branch(graph.nodes[nodes[0]].name, len(nodes), work), inside))
    return tuple(branch for branch, _ in found) if len(found) > 1 else ()


def _heavy_dependencies(graph: Graph, heavy: list[int], backwards: bool = False) -> np.ndarray:
    """Return a boolean table [nodes, heavy nodes]. Entry (i, j) is true if node i depends on node
    `heavy[j]` or is that node; with `backwards`, if `heavy[j]` depends on node i or is that node.
    """
    table = np.zeros((len(graph.nodes), len(heavy)), dtype=bool)
    table[heavy, np.arange(len(heavy))] = True
    edges = [
        (source, index) for index, sources in enumerate(graph.sources()) for _, source in sources
    ]
    for source, index in reversed(edges) if backwards else edges:
        if backwards:
            table[source] |= table[index]
        else:
            table[index] |= table[source]
    return table


def _connected_components(graph: Graph, nodes: list[int]) -> list[list[int]]:
    """Return the connected components of `nodes` (ascending indices), each ascending, in the order
    of their first nodes.

    Two nodes are connected if a result of the first is an operand of the second. The components are
    computed by union-find with path halving. Importing scipy's function instead would take longer
    than the whole command `inspect`.
    """
    parents = {each: each for each in nodes}

    def root(node: int) -> int:
        """Return the representative of the node's component so far."""
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for each in nodes:
        for _, source in graph.sources()[each]:
            if source in parents:
                parents[root(source)] = root(each)
    components: dict[int, list[int]] = {}
    for each in nodes:
        components.setdefault(root(each), []).append(each)
    return list(components.values())
