"""Strategies of experts, by hand: one rule a kind of network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_operators, check_state, fitted
from autopipe.passes.sharding.regions import (
    ReplicatedGraph,
    check_constraints_met,
    check_samples,
    graph_group_splits,
    grow_region,
    one_stage,
    replicated_graph,
    seed_axis,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class OneWeirdTrick:
    """Shares the samples of convolutions among all devices, and the outputs of the fully connected
    layers after them.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), section 4.
    Where the devices cannot share a layer's outputs equally, as many as can do, and the others
    share its samples.
    """

    name: ClassVar[str] = "one_weird_trick"

    def division(self, graph: Graph) -> Division:
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for a model without convolutions, or where devices cannot share
        samples equally.
        """
        if "convolution" not in _kinds(problem.graph):
            raise InfeasibleError(
                "one_weird_trick is made for convolutions with fully connected layers behind "
                "them, and the model has "
                "no convolution",
                hint="strategy handcrafted knows transformers and recurrent networks too",
            )
        check_one_kind(problem, self.name)
        check_samples(problem, problem.cluster.size, self.name)

    def run(self, problem: Problem) -> Placement:
        """One stage. Raises ConfigurationError for a constraint it does not fulfil, InfeasibleError
        for memory.
        """
        placement = _by_one_weird_trick(problem)
        check_constraints_met(problem, placement, self.name)
        return fitted(problem, placement)


def _kinds(graph: Graph) -> set[str]:
    return {row.kind for node in graph.nodes if (row := operator_of(node)) is not None}


def _by_one_weird_trick(problem: Problem) -> Placement:
    """One stage on all devices. Raises InfeasibleError where samples cannot be shared equally."""
    graph = problem.graph
    devices = problem.cluster.size
    samples = sample_axes(graph)
    nodes = range(len(graph.nodes))
    degrees = [degree for degree in range(devices, 0, -1) if devices % degree == 0]
    networks = [(degree, replicated_graph(graph, devices // degree, samples)) for degree in degrees]
    products = {node for node in nodes if samples.uses[node].row.kind == "matmul"}
    found: dict[int, tuple[Split, ...]] = {}
    for node in _fully_connected(networks[0][1], products):
        for degree, network in networks[:-1]:
            axis = seed_axis(network, node, degree, frozenset())
            if axis is None:
                continue
            region = grow_region(
                network, node, axis, degree, frozenset(nodes) - products | {node}, {}
            )
            cut = {node: axis} if region.open else region.axes
            found |= {
                each: network.splits(each, name, degree)
                for each, name in cut.items()
                if each not in found
            }
            break
    return one_stage(problem, with_samples_split(samples, nodes, devices, found))


def _fully_connected(network: ReplicatedGraph, products: set[int]) -> Iterator[int]:
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


def _pipeline_of_layers(problem: Problem) -> Placement:
    """A stage for each recurrent layer, or for as many in turn as let stages share the devices
    equally.

    Wu et al., "Google's Neural Machine Translation System" (2016), section 3.1, as PaSE (IPDPS
    2021, section IV) compares with it. What comes before the first layer joins it, what follows a
    layer joins that layer. Raises InfeasibleError where a stage's devices cannot share the samples.
    """
    devices = problem.cluster.size
    samples = sample_axes(problem.graph)
    layer_of = _layers(problem.graph, samples)
    layers = 1 + max(layer_of)
    count = max(each for each in range(1, min(layers, devices) + 1) if devices % each == 0)
    size = devices // count
    check_samples(problem, size, "handcrafted")
    stages = []
    for stage in range(count):
        nodes = tuple(
            node for node, layer in enumerate(layer_of) if layer * count // layers == stage
        )
        group = range(stage * size, (stage + 1) * size)
        splits = with_samples_split(samples, nodes, size, {})
        stages.append(
            Stage(nodes, tuple(group), problem.micro_batch_size, splits, problem.recomputes_all)
        )
    return Placement(tuple(stages))


def _layers(graph: Graph, samples: SampleAxes) -> list[int]:
    """For each node the recurrent layer it belongs to: the last that it depends on, else the first
    that reads it.
    """
    found: list[int] = []
    for sources, use in zip(graph.sources(), samples.uses, strict=True):
        before = max((found[producer] for _, producer in sources), default=0)
        found.append(before + (use.row.kind == "recurrent"))
    readers = graph.consumers()
    for index in range(len(found) - 1, -1, -1):
        after = (
            found[each] for name in graph.nodes[index].outputs for each in readers.get(name, ())
        )
        found[index] = found[index] or min(after, default=1)
    return [layer - 1 for layer in found]


def _largest_degree(problem: Problem) -> int:
    """Return the number of devices of a node, at most all of them, that can share the most nodes of
    the graph.

    Of equals the largest. Groups of as many devices share the samples of a micro-batch equally if
    any number allows it.
    """
    graph = problem.graph
    devices = problem.cluster.size
    within = [
        each for each in range(1, problem.cluster.devices_per_node + 1) if devices % each == 0
    ]
    degrees = [
        each for each in within if problem.micro_batch_size % (devices // each) == 0
    ] or within[-1:]
    return max(
        degrees, key=lambda each: (len(graph_group_splits(graph, devices // each, each)), each)
    )


def _tensor_parallel(problem: Problem, degree: int) -> Placement:
    """Return one stage on all devices, in groups of `degree` neighbours that share layers.

    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism" (2019), section 3. Raises InfeasibleError if `degree` does not divide the devices,
    or if groups cannot share the samples.
    """
    graph = problem.graph
    devices = problem.cluster.size
    if devices % degree:
        raise InfeasibleError(
            f"{devices} {plural(devices, 'device')} cannot be parted into groups of {degree}",
            where="strategy.tensor",
        )
    check_samples(problem, devices // degree, "handcrafted")
    found = graph_group_splits(graph, devices // degree, degree)
    splits = with_samples_split(
        sample_axes(graph), range(len(graph.nodes)), devices // degree, found
    )
    return one_stage(problem, splits)


@dataclass(frozen=True, slots=True)
class Handcrafted:
    """Splits a model as experts do by hand: by the kind of network it is.

    A network with recurrent layers becomes a pipeline of them, each layer's devices sharing samples
    (Wu et al., GNMT, 2016); one that mostly convolves is split by one_weird_trick (Krizhevsky,
    2014). In any other, groups of devices share attention heads, columns and rows of feed-forward
    layers and the vocabulary, and the groups share samples (Shoeybi et al., Megatron-LM, 2019;
    Shazeer et al., Mesh-TensorFlow, 2018).
    """

    tensor: int = 0
    """How many devices share a layer's heads, columns and vocabulary; 0 takes as many of a node as
    can share most of them. Recurrent and convolutional networks have no such groups.
    """

    name: ClassVar[str] = "handcrafted"

    def division(self, graph: Graph) -> Division:
        return Division.MANY if "recurrent" in _kinds(graph) else Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for a negative degree, InfeasibleError for an empty model or
        devices that differ.

        Also where groups that share layers cannot hold all of them.
        """
        if self.tensor < 0:
            raise ConfigurationError(
                f"tensor is {self.tensor}", hint="it must be 0 or more", where="strategy"
            )
        check_operators(problem)
        check_one_kind(problem, self.name)
        if not _kinds(problem.graph) & {"recurrent", "convolution"}:
            check_state(
                problem, problem.cluster.size, self.tensor or problem.cluster.devices_per_node
            )

    def run(self, problem: Problem) -> Placement:
        """The placement.

        Raises ConfigurationError for a constraint it does not fulfil, and InfeasibleError where
        devices cannot share the samples, `tensor` does not divide them, or memory does not hold the
        placement.
        """
        settled: tuple[tuple[str, int], ...] = ()
        work: Counter[str] = Counter()
        for each in problem.work:
            work[each.kind] += int(each.forward_flops)
        if work["recurrent"]:
            placement = _pipeline_of_layers(problem)
        elif work["convolution"] > work["matmul"]:
            check_samples(problem, problem.cluster.size, self.name)
            placement = _by_one_weird_trick(problem)
        else:
            degree = self.tensor or _largest_degree(problem)
            placement = _tensor_parallel(problem, degree)
            settled = () if self.tensor else (("tensor", degree),)
        check_constraints_met(problem, placement, self.name)
        return replace(fitted(problem, placement), options=settled)
