"""Cost of each configuration of a node by itself: computing, exchanging statistics, holding its own
parameters.

This is PaSE's t_l. Nodes that cost the same are one class: models of equal layers have few, each
worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.attention_kernels import capability_of
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
    distinct,
)
from autopipe.passes.sharding.reshard_tables import Floats, ReshardTable


@dataclass(frozen=True, slots=True)
class StageOptions:
    allowed: dict[int, tuple[Splits, ...]] = field(default_factory=dict)
    """The configurations of nodes that may not have all."""
    given: frozenset[str] = frozenset()
    """Values that others want of the stage."""
    whole: frozenset[str] = frozenset()
    """Parameters that every device has to hold whole."""
    in_flight: int = 1
    """Micro-batches between forward and backward."""
    recompute: bool = False
    """True if forward is run again for backward."""


NO_OPTIONS = StageOptions()


class StageContext:
    """A stage's nodes on its devices, with all that their costs depend on; by node of the whole
    graph.
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
        self.kinds = problem.cluster.kinds_among(devices)
        self.samples = sample_axes(graph)
        self.gradient: frozenset[str] = (
            differentiable_values(graph) if problem.train else frozenset()
        )
        self.widths = element_bytes(graph, problem.precision)
        self.layouts = LayoutTable(len(devices))
        self.reshard = ReshardTable(problem.cluster, devices)
        # Whose activations are held at once: what recomputation brings back is one micro-batch at a
        # time.
        self.kept_micro_batches = 1 if options.recompute else options.in_flight
        self.readers: dict[str, list[tuple[int, int]]] = {}
        """Nodes of the stage that read a value, and an operand's position for each way in which
        they want it.
        """
        ways: set[tuple[str, int, tuple[Dimension, ...]]] = set()
        for node in nodes:
            operands = self.samples.uses[node].space.operands
            for position, (name, words) in enumerate(
                zip(graph.nodes[node].inputs, operands, strict=True)
            ):
                if name and (name, node, words or ()) not in ways:
                    ways.add((name, node, words or ()))
                    self.readers.setdefault(name, []).append((node, position))
        self.kept: dict[int, tuple[SavedTensor, ...]] = {}
        """Tensors that each node makes backward keep, each at the first node that does."""
        self.kept_again: list[tuple[int, SavedTensor, int, SavedTensor]] = []
        """The first node that makes backward keep a value, and another that does so, too."""
        saved = (
            kept_values(graph, problem.precision, capability_of(problem.cluster))
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
        """By degree the seconds of each node's equal share on the slowest device, [forward or
        backward, nodes].
        """
        self._statistics: dict[tuple[int, int], Floats] = {}
        """By use and configurations, which `layouts` holds, so that their places stay their own."""
        self._rates: dict[frozenset[MeshAxis], float] = {}

    def is_shared_parameter(self, name: str) -> bool:
        return len(self.readers[name]) > 1 or name in self.options.whole

    def own_parameters(self, node: int) -> dict[int, Parameter]:
        """The parameters, by operand's position, that no other node reads: their layout is the
        node's choice alone.
        """
        found: dict[str, tuple[int, Parameter]] = {}
        for position, name in enumerate(self.graph.nodes[node].inputs):
            parameter = self.graph.parameter(name)
            if parameter is not None and not self.is_shared_parameter(name):
                found.setdefault(name, (position, parameter))
        return dict(found.values())

    def is_reduced_alone(self, name: str) -> bool:
        """True if shares of a value are added up though no node of the stage reads it."""
        if not name or name in self.readers:
            return False
        is_loss = name not in self.graph.consumers() and not self.graph.type_of(name).shape
        return not (is_loss and name in self.options.given)

    def times_run(self, value: str) -> int:
        """Changes of layout of a value in a micro-batch: forward, again for backward, and the
        transpose.
        """
        return 1 + self.options.recompute + (value in self.gradient)

    def seconds(self, node: int, splits: tuple[Splits, ...]) -> Floats:
        """One micro-batch's forward and backward of a node in each configuration, statistics
        included; [splits, 2].
        """
        use = self.samples.uses[node]
        degrees, of = distinct(self.layouts.mesh_positions_of(splits).degree)
        for degree in degrees.tolist():
            if degree not in self._shares:
                work = self.problem.work
                precision = self.problem.precision
                each = [
                    np.stack(node_seconds(work, device, precision, 1.0 / degree))
                    for device in self.kinds
                ]
                self._shares[degree] = np.maximum.reduce(each)
        found = np.array([self._shares[degree][:, node] for degree in degrees.tolist()])[of]
        if use.row.statistics is not no_statistics:
            found += self._exchanged(node, use, splits)
        return found

    def _exchanged(self, node: int, use: OpInstance, splits: tuple[Splits, ...]) -> Floats:
        """Seconds of exchanging statistics along joint axes, forward and backward, in each
        configuration.
        """
        key = id(use), id(splits)
        if key not in self._statistics:
            joint = {axis.name for axis in use.space.axes if axis.kind.is_joint}
            signature = signature_of(self.graph, self.graph.nodes[node])
            found = self._statistics[key] = np.zeros((len(splits), 2))
            for row, own in enumerate(splits):
                if any(split.axis in joint for split in own):
                    degrees = {split.axis: split.degree for split in own}
                    found[row] = statistics_seconds(
                        self.problem.cluster, self.devices, use, signature, degrees
                    )
        return self._statistics[key]

    def holding(self, name: str, layouts: Sequence[Layout]) -> tuple[Floats, Floats, Integers]:
        """Cost of a parameter in each of `layouts`: seconds to exchange gradients among the devices
        with the same block, and to add up micro-batches' gradients and update; bytes on a device of
        all that training keeps. Gradients go at the bandwidth of their group: many parameters share
        one exchange, and its latency is no one's.
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
        rates = []  # Seconds a byte of gradients over the devices that hold the first one's block.
        for layout in layouts:
            cutting = frozenset(axis for axes in layout.shard_axes for axis in axes)
            if cutting not in self._rates:
                group = [
                    self.devices[place]
                    for place in holders_by_shard(layout, len(self.devices))[0][1]
                ]
                self._rates[cutting] = min(
                    way.per_byte_s for way in exchange_of_gradients(self.problem, group).ways
                )
            rates.append(self._rates[cutting])
        # The update's one launch is not counted.
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
    """Bytes on one device that backward keeps of a micro-batch, for each configuration of the node
    that keeps them. `SavedTensor.local_bytes` for all of them at once.
    """
    found = np.zeros(positions.configurations, dtype=np.int64)
    for each in kept:
        size = each.bytes // positions.degrees(
            axis for dimension in each.dimensions for axis in dimension
        )
        for window, extent in each.windows:
            degree = positions.degrees([window.axis])
            spans = np.array(
                [window.span(window.count // parts) for parts in degree.tolist()], dtype=np.int64
            )
            size = np.where(degree > 1, size * spans // extent, size)
        found += size
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Cost of each configuration of a variable: seconds of a step, and bytes on a device. Of the
    seconds `gradients` are to exchange gradients once a step, `backward` is one micro-batch's
    backward.
    """

    seconds: Floats
    gradients: Floats
    backward: Floats
    memory: Integers


@dataclass(frozen=True, slots=True, eq=False)
class NodeClass:
    """Nodes equal in all that their costs depend on; `node` is the first of them."""

    stage: StageContext
    node: int
    configurations: tuple[Splits, ...]

    @property
    def mesh_positions(self) -> MeshPositions:
        return self.stage.layouts.mesh_positions_of(self.configurations)

    def reads(self, position: int) -> TensorLayouts:
        graph = self.stage.graph
        space = self.stage.samples.uses[self.node].space
        shape = graph.type_of(graph.nodes[self.node].inputs[position]).shape
        return self.stage.layouts.operand(space, position, shape, self.configurations)

    def leaves(self, position: int) -> TensorLayouts:
        """How the node leaves its result at `position`, shares of sums and means included."""
        graph = self.stage.graph
        space = self.stage.samples.uses[self.node].space
        shape = graph.type_of(graph.nodes[self.node].outputs[position]).shape
        return self.stage.layouts.result(space, position, shape, self.configurations)

    def costs(self) -> Costs:
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
                seconds = seconds + added[left.of] * stage.times_run(name)
        seconds = seconds * problem.micro_batches
        gradients = np.zeros_like(seconds)
        memory = np.zeros(len(seconds), dtype=np.int64)
        for position, parameter in stage.own_parameters(self.node).items():
            wanted = self.reads(position)
            gradient_s, update_s, held = stage.holding(parameter.value.name, wanted.layouts)
            gradients += gradient_s[wanted.of]
            seconds = seconds + update_s[wanted.of]
            memory += held[wanted.of]
        if problem.train:
            memory += stage.kept_micro_batches * kept_bytes(
                stage.kept[self.node], self.mesh_positions
            )
        return Costs(seconds + gradients, gradients, backward, memory)

    def passing_bytes(self) -> Integers:
        """For each configuration the gradients of what a node reads and writes
        (`memory.gradient_workspace`).
        """
        stage = self.stage
        node = self.stage.graph.nodes[self.node]
        found = np.zeros(len(self.configurations), dtype=np.int64)
        if not stage.problem.train or stage.samples.uses[self.node].row.kind == "view":
            return found
        read = {
            name: self.reads(place)
            for place, name in enumerate(node.inputs)
            if stage.graph.producer(name) is not None
        }
        written = {name: self.leaves(place) for place, name in enumerate(node.outputs) if name}
        for name, each in (*read.items(), *written.items()):
            found += (each.elements * stage.widths[name])[each.of]
        return found + self._scratch()

    def _scratch(self) -> Integers:
        graph = self.stage.graph
        use = self.stage.samples.uses[self.node]
        precision = self.stage.problem.precision
        degrees = ({split.axis: split.degree for split in splits} for splits in self.configurations)
        found = (scratch_of(graph, precision, self.node, use, each) for each in degrees)
        return np.array([each.samples + each.weight for each in found], dtype=np.int64)


def node_classes(stage: StageContext) -> dict[int, NodeClass]:
    known: dict[Hashable, NodeClass] = {}
    spaces: dict[Hashable, tuple[Splits, ...]] = {}
    found = {}
    for node in stage.nodes:
        key = (  # All that a node's costs depend on.
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
    # Extents matter by the degrees that divide them; where several axes make up a dimension, also
    # by what is left.
    axes = tuple((axis.name, axis.kind, math.gcd(axis.size, group)) for axis in space.axes)
    tensors = (*space.operands, *space.results)
    mixed = tuple(
        tensor for tensor in tensors if tensor and any(len(dimension) > 1 for dimension in tensor)
    )
    key = axes, outermost, (mixed, tuple(axis.size for axis in space.axes)) if mixed else ()
    if key not in known:
        known[key] = configurations(space, group, outermost)
    return known[key]
