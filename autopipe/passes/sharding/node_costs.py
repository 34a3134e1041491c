"""Cost of each configuration of a single node: compute, statistics exchanged over joint axes, and
its own parameters.

This is t_l of PaSE (Elango, IPDPS 2021, section II). Nodes with equal costs form one class,
and the costs of a class are computed once: models of equal layers have few classes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.attention_kernels import min_cuda_capability
from autopipe.ir.graph import Parameter
from autopipe.ir.layout import Layout, MeshAxis, holders_by_shard
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import no_statistics
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension
from autopipe.passes.analysis.gradients import (
    SavedTensor,
    differentiable_values,
    kept_values,
    scratch_of,
)
from autopipe.passes.analysis.operators import OpInstance, element_bytes, sample_axes
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import (
    accumulate_per_byte,
    cast_per_byte,
    node_seconds,
    update_line,
)
from autopipe.passes.cost.stage_work import exchange_of_gradients, statistics_seconds
from autopipe.passes.sharding.configurations import (
    Integers,
    LayoutTable,
    MeshPositions,
    Splits,
    TensorLayouts,
    configurations,
    index_distinct_codes,
)
from autopipe.passes.sharding.reshard_tables import Floats, ReshardTable


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Restrictions and settings for the costs of one stage. Nodes and values are those of the full
    graph.
    """

    allowed: dict[int, tuple[Splits, ...]] = field(default_factory=dict)
    """The permitted configurations of each node that may not use all of its configurations."""
    given: frozenset[str] = frozenset()
    """The names of the values that the stage outputs."""
    whole: frozenset[str] = frozenset()
    """The names of the parameters that must be replicated on all devices of the stage."""
    in_flight: int = 1
    """The number of micro-batches whose forward has run and whose backward has not."""
    recompute: bool = False
    """True if backward runs the forward again (activation recomputation)."""


NO_OPTIONS = StageOptions()


class StageContext:
    """A stage's nodes on its devices, with the data on which their costs depend. Nodes are numbered
    as in the full graph.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Sequence[int],
        devices: tuple[int, ...],
        options: StageOptions,
    ) -> None:
        graph = problem.graph
        self.problem = problem
        self.graph = graph
        self.options = options
        self.nodes = tuple(nodes)
        self.devices = devices
        self.kinds = problem.cluster.device_types_among(devices)
        self.samples = sample_axes(graph)
        self.gradient: frozenset[str] = (
            differentiable_values(graph) if problem.train else frozenset()
        )
        self.widths = element_bytes(graph, problem.precision)
        self.layouts = LayoutTable(len(devices))
        self.reshard = ReshardTable(problem.cluster, devices)
        # The number of micro-batches whose saved tensors of this node exist at a time. With
        # recomputation, saved tensors exist for one micro-batch only.
        self.kept_micro_batches = 1 if options.recompute else options.in_flight
        self.readers: dict[str, list[tuple[int, int]]] = {}
        """For each value: (node, operand position) pairs, one per node and distinct dimensions in
        which the node reads it.
        """
        known_reads: set[tuple[str, int, tuple[Dimension, ...]]] = set()
        for node in nodes:
            operands = self.samples.uses[node].space.operands
            for position, (name, dimensions) in enumerate(
                zip(graph.nodes[node].inputs, operands, strict=True)
            ):
                if name and (name, node, dimensions or ()) not in known_reads:
                    known_reads.add((name, node, dimensions or ()))
                    self.readers.setdefault(name, []).append((node, position))
        self.kept: dict[int, tuple[SavedTensor, ...]] = {}
        """For each node: the tensors that are saved for backward because of it; each tensor is
        listed at its first node.
        """
        self.kept_again: list[tuple[int, SavedTensor, int, SavedTensor]] = []
        """(first node, its saved tensor, node, its saved tensor) for each further node that saves
        an equal tensor.
        """
        saved = (
            kept_values(graph, problem.precision, min_cuda_capability(problem.cluster))
            if problem.train
            else ()
        )
        seen: dict[tuple[str, int], tuple[int, SavedTensor]] = {}
        for node in nodes if problem.train else ():
            self.kept[node] = tuple(each for each in saved[node] if each.key not in seen)
            self.kept_again += [
                (*seen[each.key], node, each) for each in saved[node] if each.key in seen
            ]
            seen.update((each.key, (node, each)) for each in self.kept[node])
        self._shares: dict[int, Floats] = {}
        """By degree: the seconds of a 1/degree part of each node on the slowest device type, of
        shape [forward or backward, nodes].
        """
        self._statistics: dict[tuple[int, int], Floats] = {}
        """By the ids of an operator instance and of configurations. `layouts` keeps the
        configurations alive, so ids stay valid.
        """
        self._rates: dict[frozenset[MeshAxis], float] = {}

    def is_shared_parameter(self, name: str) -> bool:
        """True if several reads share the parameter `name`, or it must be replicated; it then has a
        variable of its own.
        """
        return len(self.readers[name]) > 1 or name in self.options.whole

    def own_parameters(self, node: int) -> dict[int, Parameter]:
        """Return the parameters, by operand position, that only this node reads, so that their
        layout depends on its configuration only.
        """
        found: dict[str, tuple[int, Parameter]] = {}
        for position, name in enumerate(self.graph.nodes[node].inputs):
            parameter = self.graph.parameter(name)
            if parameter is not None and not self.is_shared_parameter(name):
                found.setdefault(name, (position, parameter))
        return dict(found.values())

    def is_reduced_alone(self, name: str) -> bool:
        """True if the partial sums of value `name` are reduced although no node of the stage reads
        it.

        This holds for outputs of the stage except a scalar loss: its partial sums are added when
        the loss is reported.
        """
        if not name or name in self.readers:
            return False
        is_loss = name not in self.graph.consumers() and not self.graph.type_of(name).shape
        return not (is_loss and name in self.options.given)

    def times_run(self, value: str) -> int:
        """Return the number of layout changes of a value per micro-batch: in forward, in
        recomputation, and for its gradient.
        """
        return 1 + self.options.recompute + (value in self.gradient)

    def seconds(self, node: int, splits: tuple[Splits, ...]) -> Floats:
        """Return the seconds of a node's forward and backward for one micro-batch, of shape
        [configurations, 2].

        The time of the slowest device type counts. The exchange of statistics is included.
        """
        use = self.samples.uses[node]
        degrees, degree_index = index_distinct_codes(self.layouts.mesh_positions_of(splits).degree)
        for degree in degrees.tolist():
            if degree not in self._shares:
                work = self.problem.work
                precision = self.problem.precision
                by_device = [
                    np.stack(node_seconds(work, device, precision, 1.0 / degree))
                    for device in self.kinds
                ]
                self._shares[degree] = np.maximum.reduce(by_device)
        found = np.array([self._shares[degree][:, node] for degree in degrees.tolist()])[
            degree_index
        ]
        if use.row.statistics is not no_statistics:
            found += self._exchanged(node, use, splits)
        return found

    def _exchanged(self, node: int, use: OpInstance, splits: tuple[Splits, ...]) -> Floats:
        """Return the seconds to exchange statistics over joint axes in forward and backward, of
        shape [configurations, 2].
        """
        key = id(use), id(splits)
        if key not in self._statistics:
            joint = {axis.name for axis in use.space.axes if axis.kind.is_joint}
            signature = signature_of(self.graph, self.graph.nodes[node])
            found = self._statistics[key] = np.zeros((len(splits), 2))
            for row, configuration in enumerate(splits):
                if any(split.axis in joint for split in configuration):
                    degrees = {split.axis: split.degree for split in configuration}
                    found[row] = statistics_seconds(
                        self.problem.cluster, self.devices, use, signature, degrees
                    )
        return self._statistics[key]

    def holding(self, name: str, layouts: Sequence[Layout]) -> tuple[Floats, Floats, Integers]:
        """Return (gradient seconds, update seconds, bytes) of a parameter for each of `layouts`.

        - gradient seconds: to all-reduce its gradients over the devices that hold equal shards,
          once per step. Only bandwidth counts: many parameters share one all-reduce, so latency is
          attributed to none of them.
        - update seconds: to accumulate gradients over micro-batches, cast, and run the optimizer,
          per step.
        - bytes: of parameter, gradient and optimizer state on one device.
        """
        parts = [layout.shard_count for layout in layouts]
        devices = len(self.devices)
        by_parts = {
            count: state_of(self.problem, ((name, count),), {name: devices // count})
            for count in set(parts)
        }
        states = [by_parts[count] for count in parts]
        gradients = np.array([state.gradient_bytes for state in states], dtype=float)
        updated = np.array([state.updated_bytes for state in states], dtype=float)
        kinds = self.kinds
        added = max(map(accumulate_per_byte, kinds)) * (self.problem.micro_batches - 1)
        # Seconds per gradient byte, over the devices that hold the shard of position 0.
        rates = []
        for layout in layouts:
            mesh_axes = frozenset(axis for axes in layout.shard_axes for axis in axes)
            if mesh_axes not in self._rates:
                group = [
                    self.devices[position]
                    for position in holders_by_shard(layout, len(self.devices))[0][1]
                ]
                self._rates[mesh_axes] = min(
                    algorithm.per_byte_s
                    for algorithm in exchange_of_gradients(self.problem, group).ways
                )
            rates.append(self._rates[mesh_axes])
        # The launch overhead of the optimizer is not counted.
        update = max(
            update_line(device, self.problem.optimizer.states).per_byte_s for device in kinds
        )
        casts = [
            state.low_precision_bytes + 2 * self.problem.micro_batches * state.cast_bytes
            for state in states
        ]
        cast = max(map(cast_per_byte, kinds)) * np.array(casts, dtype=float)
        return (
            gradients * np.array(rates),
            gradients * added + updated * update + cast,
            np.array([state.total for state in states], dtype=np.int64),
        )


def kept_bytes(kept: Sequence[SavedTensor], positions: MeshPositions) -> Integers:
    """Return the bytes on one device that one micro-batch saves for backward, of shape
    [configurations].

    `kept` are tensors saved by one node, and `positions` its configurations. This is
    `SavedTensor.local_bytes` for all configurations at once.
    """
    found = np.zeros(positions.configurations, dtype=np.int64)
    for saved in kept:
        size = saved.bytes // positions.degrees(
            axis for dimension in saved.dimensions for axis in dimension
        )
        for window, full_size in saved.windows:
            degree = positions.degrees([window.axis])
            spans = np.array(
                [window.span(window.count // parts) for parts in degree.tolist()], dtype=np.int64
            )
            size = np.where(degree > 1, size * spans // full_size, size)
        found += size
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Costs of each configuration of a variable, each of shape [configurations].

    `seconds`: per step, all included. `gradients`: the part of `seconds` that all-reduces gradients
    once per step. `backward`: seconds of the backward of one micro-batch. `memory`: bytes on one
    device.
    """

    seconds: Floats
    gradients: Floats
    backward: Floats
    memory: Integers


@dataclass(frozen=True, slots=True, eq=False)
class NodeClass:
    """Nodes with equal costs; `node` is the first of them."""

    stage: StageContext
    node: int
    configurations: tuple[Splits, ...]

    @property
    def mesh_positions(self) -> MeshPositions:
        return self.stage.layouts.mesh_positions_of(self.configurations)

    def reads(self, position: int) -> TensorLayouts:
        """Return the layouts in which the node needs its operand at `position`."""
        graph = self.stage.graph
        space = self.stage.samples.uses[self.node].space
        shape = graph.type_of(graph.nodes[self.node].inputs[position]).shape
        return self.stage.layouts.operand(space, position, shape, self.configurations)

    def leaves(self, position: int) -> TensorLayouts:
        """Return the layouts that the node produces for its result at `position`, partial sums and
        means included.
        """
        graph = self.stage.graph
        space = self.stage.samples.uses[self.node].space
        shape = graph.type_of(graph.nodes[self.node].outputs[position]).shape
        return self.stage.layouts.result(space, position, shape, self.configurations)

    def costs(self) -> Costs:
        """Return the costs of each configuration per step."""
        stage = self.stage
        problem = self.stage.problem
        forward, backward = stage.seconds(self.node, self.configurations).T
        if not problem.train:
            backward = np.zeros_like(forward)
        seconds = forward * (1 + stage.options.recompute) + backward if problem.train else forward
        for position, name in enumerate(stage.graph.nodes[self.node].outputs):
            if stage.is_reduced_alone(name):
                left = self.leaves(position)
                size = stage.graph.type_of(name).elements * stage.widths[name]
                added = stage.reshard.to_copies(left.layouts, size)
                seconds = seconds + added[left.layout_of] * stage.times_run(name)
        seconds = seconds * problem.micro_batches
        gradients = np.zeros_like(seconds)
        memory = np.zeros(len(seconds), dtype=np.int64)
        for position, parameter in stage.own_parameters(self.node).items():
            wanted = self.reads(position)
            gradient_s, update_s, held = stage.holding(parameter.value.name, wanted.layouts)
            gradients += gradient_s[wanted.layout_of]
            seconds = seconds + update_s[wanted.layout_of]
            memory += held[wanted.layout_of]
        if problem.train:
            memory += stage.kept_micro_batches * kept_bytes(
                stage.kept[self.node], self.mesh_positions
            )
        return Costs(seconds + gradients, gradients, backward, memory)

    def passing_bytes(self) -> Integers:
        """Return the bytes of temporary memory while the node runs its backward, of shape
        [configurations].

        These are the gradients of the values that it reads and writes, and its workspace
        (`memory.gradient_workspace`).
        """
        stage = self.stage
        node = self.stage.graph.nodes[self.node]
        found = np.zeros(len(self.configurations), dtype=np.int64)
        if not stage.problem.train or stage.samples.uses[self.node].row.kind == "view":
            return found
        read = {
            name: self.reads(position)
            for position, name in enumerate(node.inputs)
            if stage.graph.producer(name) is not None
        }
        written = {
            name: self.leaves(position) for position, name in enumerate(node.outputs) if name
        }
        for name, each in (*read.items(), *written.items()):
            found += (each.elements * stage.widths[name])[each.layout_of]
        return found + self._scratch()

    def _scratch(self) -> Integers:
        graph = self.stage.graph
        use = self.stage.samples.uses[self.node]
        precision = self.stage.problem.precision
        degrees = ({split.axis: split.degree for split in splits} for splits in self.configurations)
        found = (scratch_of(graph, precision, self.node, use, each) for each in degrees)
        return np.array([each.samples + each.weight for each in found], dtype=np.int64)


def node_classes(stage: StageContext) -> dict[int, NodeClass]:
    """Return the class of each node of the stage, by node."""
    known: dict[Hashable, NodeClass] = {}
    spaces: dict[Hashable, tuple[Splits, ...]] = {}
    found = {}
    for node in stage.nodes:
        key = (  # Everything on which the costs of a node depend.
            id(stage.samples.uses[node]),
            stage.problem.work[node],
            stage.samples.axes[node],
            stage.options.allowed.get(node),
            tuple(
                (position, each.trainable) for position, each in stage.own_parameters(node).items()
            ),
            tuple((each.bytes, each.dimensions) for each in stage.kept.get(node, ())),
            tuple(
                (stage.is_reduced_alone(name), name in stage.gradient)
                for name in stage.graph.nodes[node].outputs
            ),
        )
        if key not in known:
            known[key] = NodeClass(stage, node, _configurations(stage, node, spaces))
        found[node] = known[key]
    return found


def _configurations(
    stage: StageContext, node: int, known: dict[Hashable, tuple[Splits, ...]]
) -> tuple[Splits, ...]:
    if node in stage.options.allowed:
        return stage.options.allowed[node]
    space = stage.samples.uses[node].space
    outermost = stage.samples.axes[node]
    group = len(stage.devices)
    # Configurations depend on axis sizes only through the degrees that divide them, except if a
    # dimension merges several axes: there the local sizes matter too.
    axes = tuple((axis.name, axis.kind, math.gcd(axis.size, group)) for axis in space.axes)
    tensors = (*space.operands, *space.results)
    merged_tensors = tuple(
        tensor for tensor in tensors if tensor and any(len(dimension) > 1 for dimension in tensor)
    )
    key = (
        axes,
        outermost,
        (merged_tensors, tuple(axis.size for axis in space.axes)) if merged_tensors else (),
    )
    if key not in known:
        known[key] = configurations(space, group, outermost)
    return known[key]
