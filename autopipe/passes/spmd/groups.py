"""Layers within groups of neighbouring devices, samples among the groups: tensor parallelism as it is done by hand."""

from __future__ import annotations

from collections.abc import Iterable

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Split
from autopipe.passes.spmd.regions import tensor_splits
from autopipe.passes.spmd.replicas import ReplicatedNetwork, replicated_network


def group_splits(network: ReplicatedNetwork, degree: int, nodes: Iterable[int]) -> dict[int, tuple[Split, ...]]:
    """The splits of those of `nodes` that a replica's `degree` devices share.

    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
    section 3. Where a cut leads to a node that needs a value whole, nothing is cut.
    """
    if degree == 1:
        return {}
    members, samples = tuple(nodes), network.samples
    tables = frozenset(
        network.graph.nodes[node].inputs[0]
        for node in members
        if samples.uses[node].row.kind == "memory" and samples.axes[node] is not None
    )
    cut = tensor_splits(network, members, degree, tables & network.weights.keys(), lambda node: False)
    return {node: network.splits(node, split.axis, degree) for node, (split,) in cut}


@remembered(4 * GRAPHS)
def whole_group_splits(graph: Graph, replicas: int, degree: int) -> dict[int, tuple[Split, ...]]:
    """The same for all nodes of a graph on `replicas` replicas of `degree` devices."""
    return group_splits(replicated_network(graph, replicas), degree, range(len(graph.nodes)))
