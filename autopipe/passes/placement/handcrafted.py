"""Strategies `handcrafted` and `one_weird_trick`: published rules by which experts parallelise
networks by hand, one rule per kind of network.
"""

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
from autopipe.passes.cost.memory_check import (
    check_operators,
    check_single_stage_devices,
    check_state_fits,
    with_required_recomputation,
)
from autopipe.passes.sharding.regions import (
    ReplicatedGraph,
    check_constraints_met,
    check_samples_divide,
    graph_megatron_splits,
    grow_region,
    replicated_graph,
    seed_axis,
    single_stage_placement,
    with_sample_splits,
)


@dataclass(frozen=True, slots=True)
class OneWeirdTrick:
    """Split convolutions by samples, and the fully connected layers after them by outputs, over all
    devices.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), section 4.
    If the outputs of a layer cannot be divided evenly among all devices, they are divided among the
    largest possible number of devices, and groups of this size split the samples.
    """

    name: ClassVar[str] = "one_weird_trick"

    def division(self, graph: Graph) -> Division:
        """Return `Division.FEW`: a single stage needs no pipeline, so large micro-batches are
        preferred.
        """
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for a model without convolutions, for devices of different types
        that may not share a stage, or if the devices cannot split the samples evenly.
        """
        if "convolution" not in _operator_kinds(problem.graph):
            raise InfeasibleError(
                "one_weird_trick requires convolutions followed by fully connected layers, but "
                "the model lacks convolutions",
                hint="use strategy handcrafted, which supports transformers and recurrent networks",
            )
        check_single_stage_devices(problem, self.name)
        check_samples_divide(problem, problem.cluster.size, self.name)

    def run(self, problem: Problem) -> Placement:
        """Return a placement with one stage on all devices. Raise ConfigurationError for a violated
        constraint, and InfeasibleError if memory does not suffice.
        """
        placement = _place_one_weird_trick(problem)
        check_constraints_met(problem, placement, self.name)
        return with_required_recomputation(problem, placement)


def _operator_kinds(graph: Graph) -> set[str]:
    """Return the operator kinds that occur in the graph, such as `matmul` and `convolution`."""
    return {row.kind for node in graph.nodes if (row := operator_of(node)) is not None}


def _place_one_weird_trick(problem: Problem) -> Placement:
    """Return a placement with one stage on all devices, split as `OneWeirdTrick` describes. Raise
    InfeasibleError if the samples cannot be split evenly.
    """
    graph = problem.graph
    devices = problem.cluster.size
    samples = sample_axes(graph)
    nodes = range(len(graph.nodes))
    degrees = [degree for degree in range(devices, 0, -1) if devices % degree == 0]
    networks = [(degree, replicated_graph(graph, devices // degree, samples)) for degree in degrees]
    matmuls = {node for node in nodes if samples.uses[node].row.kind == "matmul"}
    found: dict[int, tuple[Split, ...]] = {}
    for node in _fully_connected_matmuls(networks[0][1], matmuls):
        for degree, network in networks[:-1]:
            axis = seed_axis(network, node, degree, frozenset())
            if axis is None:
                continue
            region = grow_region(
                network, node, axis, degree, frozenset(nodes) - matmuls | {node}, {}
            )
            axis_by_node = {node: axis} if region.open else region.axes
            found |= {
                each: network.splits(each, name, degree)
                for each, name in axis_by_node.items()
                if each not in found
            }
            break
    return single_stage_placement(problem, with_sample_splits(samples, nodes, devices, found))


def _fully_connected_matmuls(network: ReplicatedGraph, matmuls: set[int]) -> Iterator[int]:
    """Yield, in ascending order, the nodes of `matmuls` that read a parameter and whose results
    reach no convolution.
    """
    graph = network.graph
    feeds_convolution: set[str] = set()
    for node in range(len(graph.nodes) - 1, -1, -1):
        operation = graph.nodes[node]
        if network.uses[node].row.kind == "convolution" or not feeds_convolution.isdisjoint(
            operation.outputs
        ):
            feeds_convolution.update(name for name in operation.inputs if name)
    for node in sorted(matmuls):
        if feeds_convolution.isdisjoint(graph.nodes[node].outputs) and network.parameters_of(node):
            yield node


def _pipeline_recurrent_layers(problem: Problem) -> Placement:
    """Return a pipeline with one stage per recurrent layer, or per several consecutive layers if
    there are more layers than stages. The number of stages divides the number of devices.

    Wu et al., "Google's Neural Machine Translation System" (2016), section 3.1, the baseline of
    PaSE (IPDPS 2021, section IV). Nodes before the first layer join the first layer's stage, and
    nodes after a layer join that layer's stage. Raise InfeasibleError if a stage's devices cannot
    split the samples evenly.
    """
    devices = problem.cluster.size
    samples = sample_axes(problem.graph)
    layer_of = _recurrent_layers(problem.graph, samples)
    layers = 1 + max(layer_of)
    count = max(each for each in range(1, min(layers, devices) + 1) if devices % each == 0)
    size = devices // count
    check_samples_divide(problem, size, "handcrafted")
    stages = []
    for stage in range(count):
        nodes = tuple(
            node for node, layer in enumerate(layer_of) if layer * count // layers == stage
        )
        group = range(stage * size, (stage + 1) * size)
        splits = with_sample_splits(samples, nodes, size, {})
        stages.append(
            Stage(nodes, tuple(group), problem.micro_batch_size, splits, problem.recomputes_all)
        )
    return Placement(tuple(stages))


def _recurrent_layers(graph: Graph, samples: SampleAxes) -> list[int]:
    """Return the recurrent layer to which each node belongs, numbered from 0: the last layer on
    which the node depends, otherwise the first layer that reads the node's results, otherwise 0.
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


def _best_tensor_degree(problem: Problem) -> int:
    """Return the number of devices within a node of the cluster over which tensor parallelism can
    split the most operators; ties: the largest number wins.

    Numbers with which the replicas can split a micro-batch evenly are preferred; others are
    considered only if there are no such numbers.
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
        degrees, key=lambda each: (len(graph_megatron_splits(graph, devices // each, each)), each)
    )


def _place_tensor_parallel(problem: Problem, degree: int) -> Placement:
    """Return a placement with one stage on all devices, in tensor-parallel groups of `degree`
    neighbouring devices.

    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism" (2019), section 3. Raise InfeasibleError if `degree` does not divide the number of
    devices, or if the groups cannot split the samples evenly.
    """
    graph = problem.graph
    devices = problem.cluster.size
    if devices % degree:
        raise InfeasibleError(
            f"{devices} {plural(devices, 'device')} cannot be divided into groups of size {degree}",
            where="strategy.tensor",
        )
    check_samples_divide(problem, devices // degree, "handcrafted")
    found = graph_megatron_splits(graph, devices // degree, degree)
    splits = with_sample_splits(
        sample_axes(graph), range(len(graph.nodes)), devices // degree, found
    )
    return single_stage_placement(problem, splits)


@dataclass(frozen=True, slots=True)
class Handcrafted:
    """Split a model as experts do by hand, by a rule for the kind of network.

    A network with recurrent layers becomes a pipeline of these layers, with data parallelism inside
    each stage (Wu et al., GNMT, 2016). A network in which convolutions have more FLOPs than matmuls
    is split like strategy one_weird_trick (Krizhevsky, 2014). In all other networks, the devices of
    a group split attention heads, the columns and rows of feed-forward layers, and the vocabulary,
    and the groups split the samples (Shoeybi et al., Megatron-LM, 2019; Shazeer et al.,
    Mesh-TensorFlow, 2018).
    """

    tensor: int = 0
    """Number of devices that split a layer's attention heads, columns and vocabulary. Default: 0,
    the number of devices within a node over which the most operators can be split. Ignored for
    recurrent and convolutional networks.
    """

    name: ClassVar[str] = "handcrafted"

    def division(self, graph: Graph) -> Division:
        """Return `Division.MANY` for a model with recurrent layers, which becomes a pipeline, and
        otherwise `Division.FEW`.
        """
        return Division.MANY if "recurrent" in _operator_kinds(graph) else Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError if `tensor` is negative.

        Raise InfeasibleError for a model without operators, for devices of different types that may
        not share a stage, and if the memory of tensor-parallel groups does not suffice for
        parameters and optimizer state.
        """
        if self.tensor < 0:
            raise ConfigurationError(
                f"tensor is {self.tensor}, expected at least 0",
                hint="set strategy.tensor to at least 0",
                where="strategy",
            )
        check_operators(problem)
        check_single_stage_devices(problem, self.name)
        if not _operator_kinds(problem.graph) & {"recurrent", "convolution"}:
            check_state_fits(
                problem, problem.cluster.size, self.tensor or problem.cluster.devices_per_node
            )

    def run(self, problem: Problem) -> Placement:
        """Return the placement by the rule for the model's kind of network.

        Raise ConfigurationError for a violated constraint. Raise InfeasibleError if the devices
        cannot split the samples evenly, if `tensor` does not divide the number of devices, or if
        memory does not suffice.
        """
        chosen_options: tuple[tuple[str, int], ...] = ()
        work: Counter[str] = Counter()
        for each in problem.work:
            work[each.kind] += int(each.forward_flops)
        if work["recurrent"]:
            placement = _pipeline_recurrent_layers(problem)
        elif work["convolution"] > work["matmul"]:
            check_samples_divide(problem, problem.cluster.size, self.name)
            placement = _place_one_weird_trick(problem)
        else:
            degree = self.tensor or _best_tensor_degree(problem)
            placement = _place_tensor_parallel(problem, degree)
            chosen_options = () if self.tensor else (("tensor", degree),)
        check_constraints_met(problem, placement, self.name)
        return replace(with_required_recomputation(problem, placement), options=chosen_options)
