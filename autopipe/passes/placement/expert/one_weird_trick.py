"""Convolutions by samples, the fully connected layers behind them by outputs (Krizhevsky, 2014)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, fitted
from autopipe.passes.sharding.regions import (
    Network,
    NodeSplits,
    check_samples,
    check_wishes,
    grow,
    replicated_network,
    seed_axis,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class OneWeirdTrick:
    """Shares the samples of convolutions among all devices, and the outputs of the fully connected layers after them.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), section 4. Where the devices
    cannot share a layer's outputs equally, as many as can do, and the others share its samples.
    """

    name: ClassVar[str] = "one_weird_trick"

    def division(self, graph: Graph) -> Division:
        """It makes one stage."""
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for a model without convolutions, or where devices cannot share samples equally."""
        if not has_convolutions(problem.graph):
            raise InfeasibleError(
                "one_weird_trick is made for convolutions with fully connected layers behind them, and the model has "
                "no convolution",
                hint="strategy expert knows transformers and recurrent networks too",
            )
        check_one_kind(problem, self.name)
        check_samples(problem, problem.cluster.size, self.name)

    def run(self, problem: Problem) -> Placement:
        """One stage. Raises ConfigurationError for a constraint it does not fulfil, InfeasibleError for memory."""
        placement = by_one_weird_trick(problem)
        check_wishes(problem, placement, self.name)
        return fitted(problem, placement)


def has_convolutions(graph: Graph) -> bool:
    """True if some node is a convolution."""
    return any(use.row.kind == "convolution" for use in sample_axes(graph).uses)


def by_one_weird_trick(problem: Problem) -> Placement:
    """One stage on all devices. Raises InfeasibleError where samples cannot be shared equally."""
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = tuple(range(problem.cluster.size))
    recompute = problem.train and problem.recompute == "full"
    splits = _splits(problem.graph, len(devices))
    return Placement((Stage(nodes, devices, problem.micro_batch_size, splits, recompute),))


def _splits(graph: Graph, devices: int) -> NodeSplits:
    samples = sample_axes(graph)
    networks = [
        (degree, replicated_network(graph, devices // degree, samples))
        for degree in range(devices, 1, -1)
        if devices % degree == 0
    ]
    nodes = range(len(graph.nodes))
    products = {node for node in nodes if samples.uses[node].row.kind == "matmul"}
    found: dict[int, tuple[Split, ...]] = {}
    for node in _fully_connected(networks[0][1] if networks else replicated_network(graph, 1, samples), products):
        for degree, network in networks:
            axis = seed_axis(network, node, degree, frozenset())
            if axis is None:
                continue
            members = frozenset(nodes) - products | {node}
            region = grow(network, node, axis, degree, members, {})
            cut = {node: axis} if region.open else region.axes
            found |= {each: network.splits(each, name, degree) for each, name in cut.items() if each not in found}
            break
    return with_samples_split(samples, nodes, devices, found)


def _fully_connected(network: Network, products: set[int]) -> Iterator[int]:
    """Products with weights from which no convolution follows, in order."""
    graph = network.graph
    before: set[str] = set()
    for node in range(len(graph.nodes) - 1, -1, -1):
        each = graph.nodes[node]
        if network.uses[node].row.kind == "convolution" or not before.isdisjoint(each.outputs):
            before.update(name for name in each.inputs if name)
    for node in sorted(products):
        if before.isdisjoint(graph.nodes[node].outputs) and network.parameters_of(node):
            yield node
