"""A network whose samples are shared out first: each node's other cuts are inside a share of its samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_blocks
from autopipe.ir.placement import Split
from autopipe.ir.problem import Problem
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.spmd.network import Network, weights_of

NodeSplits = tuple[tuple[int, tuple[Split, ...]], ...]
"""Splits by node, as a stage holds them."""


@dataclass(frozen=True, slots=True)
class ReplicatedNetwork(Network):
    """A graph on `replicas` groups of devices, each with an equal share of the samples."""

    samples: SampleAxes
    replicas: int

    def splits(self, node: int, axis: str, degree: int) -> tuple[Split, ...]:
        """A node's splits: its samples among the replicas, and inside each of them `axis` in `degree` parts."""
        own = self.samples.axes[node]
        outer = (Split(own, self.replicas),) if own is not None and self.replicas > 1 else ()
        return (*outer, Split(axis, degree))

    def splits_on(self, node: int, axis: str, degree: int) -> bool:
        """True if a replica's `degree` devices can share a node along an axis in equal blocks.

        A node without samples stays whole where there are several replicas: its parts would go over all the devices.
        """
        space = self.uses[node].space
        if space.axis(axis).kind is AxisKind.WHOLE:
            return False
        if self.replicas > 1 and self.samples.axes[node] in (None, axis):
            return False
        return are_blocks(space, self.splits(node, axis, degree))


def replicated_network(graph: Graph, replicas: int, samples: SampleAxes | None = None) -> ReplicatedNetwork:
    """The network of a graph whose samples `replicas` replicas share."""
    samples = samples or sample_axes(graph)
    return ReplicatedNetwork(graph, samples.uses, weights_of(graph), graph.consumers(), samples, replicas)


def check_samples(problem: Problem, replicas: int, strategy: str) -> None:
    """Raise InfeasibleError unless `replicas` groups of devices can share a micro-batch equally."""
    samples = problem.micro_batch_size
    if replicas > 1 and not problem.graph.batch_axes:
        raise InfeasibleError(
            f"{strategy} cannot share samples among {replicas} replicas: no input of the model carries any",
            hint="say which axis of each input counts samples in model.batch_axes, or choose another strategy",
        )
    if samples % replicas:
        raise InfeasibleError(
            f"{strategy} cannot share a micro-batch of {samples} samples equally among {replicas} replicas",
            hint=f"choose a micro-batch size that {replicas} divides, fewer devices, or another strategy",
        )


def with_samples_split(
    samples: SampleAxes, nodes: Iterable[int], replicas: int, found: dict[int, tuple[Split, ...]]
) -> NodeSplits:
    """The splits `found`, and for the others of `nodes` a split of their samples.

    Raises InfeasibleError, naming the node, where samples cannot be cut into equal blocks.
    """
    others = samples.splits((node for node in nodes if node not in found), replicas)
    return tuple(sorted((*found.items(), *others)))
