"""The ways in which a group of devices may share a stage: its samples, its layers, or both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.placement.piper.blocks import Blocks
from autopipe.passes.sharding.regions import (
    NodeSplits,
    ReplicatedNetwork,
    group_splits,
    replicated_network,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class StageSharing:
    """`replicas` share the samples, each of them `tensor` neighbouring devices that share layers; `splits` by block."""

    replicas: int
    tensor: int
    splits: tuple[NodeSplits, ...]

    @property
    def devices(self) -> int:
        """The size of the group."""
        return self.replicas * self.tensor

    def placement(self, problem: Problem, blocks: Blocks) -> Placement:
        """Each block as a stage by itself, all on the first devices."""
        devices = tuple(range(self.devices))
        pairs = zip(blocks.nodes, self.splits, strict=True)
        return Placement(tuple(Stage(nodes, devices, problem.micro_batch_size, splits) for nodes, splits in pairs))


def sharings(problem: Problem, blocks: Blocks, samples: SampleAxes) -> Iterator[StageSharing]:
    """All of them, the smallest groups first.

    Layers are shared inside a node of the cluster. A group fits into a node or has whole nodes, so that what it takes
    does not depend on where it stands.
    """
    node = problem.cluster.devices_per_node
    for devices in range(1, problem.cluster.size + 1):
        if devices > node and devices % node:
            continue
        for tensor in range(1, min(devices, node) + 1):
            if devices % tensor == 0 and node % tensor == 0:
                try:
                    yield _sharing(problem, blocks, samples, devices // tensor, tensor)
                except InfeasibleError:
                    continue  # Some node's samples cannot be cut into so many equal parts.


def _sharing(problem: Problem, blocks: Blocks, samples: SampleAxes, replicas: int, tensor: int) -> StageSharing:
    """Sharing of blocks.

    Raises InfeasibleError where `replicas` cannot share the samples, or nothing can be shared by layers.
    """
    graph = problem.graph
    if problem.micro_batch_size % replicas or (replicas > 1 and not graph.batch_axes):
        raise InfeasibleError(f"{replicas} replicas cannot share {problem.micro_batch_size} samples")
    network = replicated_network(graph, replicas, samples)
    found = [_closed(network, nodes, group_splits(network, tensor, nodes)) for nodes in blocks.nodes]
    if tensor > 1 and not any(found):
        raise InfeasibleError(f"no layer can be shared by {tensor} devices")
    pairs = zip(blocks.nodes, found, strict=True)
    splits = tuple(with_samples_split(samples, nodes, replicas, own) for nodes, own in pairs)
    return StageSharing(replicas, tensor, splits)


def _closed(
    network: ReplicatedNetwork, nodes: tuple[int, ...], found: dict[int, tuple[Split, ...]]
) -> dict[int, tuple[Split, ...]]:
    """The splits of a block's layers; none where a value would leave the block cut."""
    graph, members = network.graph, set(nodes)
    for node, splits in found.items():
        for name, words in zip(graph.nodes[node].outputs, network.uses[node].space.results, strict=True):
            leaves = name in graph.outputs or not members.issuperset(network.readers.get(name, ()))
            if leaves and any(splits[-1].axis in dimension for dimension in words or ()):
                return {}
    return found
