"""Cost of each configuration of a node by itself: computing, exchanging statistics, holding its own parameters.

This is PaSE's t_l. Nodes that cost the same are one class: models of equal layers have few, each worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.layout import Layout, MeshAxis
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import no_statistics
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension
from autopipe.passes.analysis.gradients import SavedTensor, differentiable_values, kept_values
from autopipe.passes.analysis.operators import OpInstance, element_bytes, sample_axes
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import accumulate_per_byte, node_seconds, update_line
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


@dataclass(frozen=True, slots=True)
class ValueReader:
    """A node that reads a value, and one of the operands' positions where it does."""

    node: int
    position: int


@dataclass(frozen=True, slots=True)
class SharedSave:
    """A value that `node` makes backward keep, as `first` did before it: each device keeps the larger block."""

    first: int
    by_first: SavedTensor
    node: int
    by_node: SavedTensor


@dataclass(frozen=True, slots=True, eq=False)
class StageContext:
    """A stage's nodes on its devices, with all that their costs depend on; by node of the whole graph.

    `readers` of a value are the stage's nodes that read it, each once for each way in which it wants it. `kept` is what
    each node makes backward keep, values at the first node that does; `kept_again` are the other nodes that do.
    """

    problem: Problem
    nodes: tuple[int, ...]
    devices: tuple[int, ...]
    options: StageOptions
    uses: tuple[OpInstance, ...]
    sample_axes: tuple[str | None, ...]
    gradient: frozenset[str]
    readers: dict[str, tuple[ValueReader, ...]]
    kept: dict[int, tuple[SavedTensor, ...]]
    kept_again: tuple[SharedSave, ...]
    widths: dict[str, int]
    """Bytes an element of each value."""

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    def own_parameters(self, node: int) -> dict[int, str]:
        """The parameters, by operand's position, that no other node reads: their layout is the node's choice alone."""
        found: dict[str, int] = {}
        for position, name in enumerate(self.graph.nodes[node].inputs):
            if name and self.graph.parameter(name) is not None and not self.is_shared_parameter(name):
                found.setdefault(name, position)
        return {position: name for name, position in found.items()}

    def is_shared_parameter(self, name: str) -> bool:
        return len(self.readers[name]) > 1 or name in self.options.whole


def stage_context(
    problem: Problem, nodes: Sequence[int], devices: tuple[int, ...], options: StageOptions
) -> StageContext:
    graph, samples = problem.graph, sample_axes(problem.graph)
    readers: dict[str, dict[tuple[int, tuple[Dimension, ...]], ValueReader]] = {}
    for node in nodes:
        operands = samples.uses[node].space.operands
        for position, (name, words) in enumerate(zip(graph.nodes[node].inputs, operands, strict=True)):
            if name:
                readers.setdefault(name, {}).setdefault((node, words or ()), ValueReader(node, position))
    # Tensors that each node is the first to keep, and those that others keep again.
    saved = kept_values(graph, samples.uses, problem.precision) if problem.train else ()
    seen: dict[tuple[str, int], tuple[int, SavedTensor]] = {}
    kept: dict[int, tuple[SavedTensor, ...]] = {}
    kept_again = []
    for node in nodes if problem.train else ():
        kept[node] = tuple(each for each in saved[node] if each.key not in seen)
        kept_again += [SharedSave(*seen[each.key], node, each) for each in saved[node] if each.key in seen]
        seen.update((each.key, (node, each)) for each in kept[node])
    return StageContext(
        problem=problem,
        nodes=tuple(nodes),
        devices=devices,
        options=options,
        uses=samples.uses,
        sample_axes=samples.axes,
        gradient=differentiable_values(graph) if problem.train else frozenset(),
        readers={name: tuple(each.values()) for name, each in readers.items()},
        kept=kept,
        kept_again=tuple(kept_again),
        widths=element_bytes(graph, samples.uses, problem.precision),
    )


class Holding(NamedTuple):
    """A parameter on one device of a group, for each of several layouts.

    Seconds a step to exchange gradients among the devices with the same block, and to add micro-batches' gradients to
    one another and update; bytes of parameter, gradient and optimizer's state.
    """

    gradient_s: Floats
    update_s: Floats
    bytes: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Seconds of nodes on the slowest device of a group, by the share that it computes; and the cost of parameters."""

    problem: Problem
    devices: tuple[int, ...]
    _by_degree: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _statistics: dict[tuple[int, int], tuple[Sequence[Splits], Floats]] = field(default_factory=dict)
    """By use and configurations, which are held so that their place stays their own."""
    _rates: dict[frozenset[MeshAxis], float] = field(default_factory=dict)

    def seconds(
        self, node: int, use: OpInstance, configurations: Sequence[Splits], positions: MeshPositions
    ) -> tuple[Floats, Floats]:
        """One micro-batch's forward and backward of a node in each configuration, statistics included."""
        degrees, of = distinct(positions.degree)
        found = np.array([self._computed(node, degree) for degree in degrees.tolist()])[of]
        if use.row.statistics is not no_statistics and any(axis.kind.is_joint for axis in use.space.axes):
            found += self._exchanged(node, use, configurations)
        return found[:, 0], found[:, 1]

    def _computed(self, node: int, degree: int) -> tuple[float, float]:
        """Forward and backward of one of `degree` equal shares."""
        if degree not in self._by_degree:
            kinds = {self.problem.cluster.devices[device] for device in self.devices}
            work, precision = self.problem.work, self.problem.precision
            each = [node_seconds(work, device, precision, 1.0 / degree) for device in kinds]
            forward, backward = (np.maximum.reduce(found) for found in zip(*each, strict=True))
            self._by_degree[degree] = forward, backward
        forward, backward = self._by_degree[degree]
        return float(forward[node]), float(backward[node])

    def _exchanged(self, node: int, use: OpInstance, configurations: Sequence[Splits]) -> Floats:
        """Forward and backward of what the devices exchange of statistics in each configuration."""
        key = id(use), id(configurations)
        if key not in self._statistics:
            joint = {axis.name for axis in use.space.axes if axis.kind.is_joint}
            signature = signature_of(self.problem.graph, self.problem.graph.nodes[node])
            found = np.zeros((len(configurations), 2))
            for row, splits in enumerate(configurations):
                if any(split.axis in joint for split in splits):
                    degrees = {split.axis: split.degree for split in splits}
                    seconds = statistics_seconds(self.problem.cluster, self.devices, use, signature, degrees)
                    found[row] = seconds.forward_s, seconds.backward_s
            self._statistics[key] = configurations, found
        return self._statistics[key][1]

    def holding(self, name: str, layouts: Sequence[Layout]) -> Holding:
        """Cost of parameter `name` in each of `layouts`.

        Gradients go at the bandwidth of their group: many parameters share one exchange, and its latency is no one's.
        """
        parts = [layout.parts for layout in layouts]
        devices = len(self.devices)
        by_parts = {count: state_of(self.problem, ((name, count),), {name: devices // count}) for count in set(parts)}
        states = [by_parts[count] for count in parts]
        gradients = np.array([state.gradient_bytes for state in states], dtype=float)
        updated = np.array([state.updated_bytes for state in states], dtype=float)
        # Seconds a step of adding up a byte of gradients and of an update by it, on the slowest device, but for the
        # update's one launch.
        kinds = {self.problem.cluster.devices[device] for device in self.devices}
        added = max(accumulate_per_byte(device) for device in kinds) * (self.problem.micro_batches - 1)
        update = max(update_line(device, self.problem.optimizer.states).per_byte_s for device in kinds)
        return Holding(
            gradient_s=gradients * np.array([self._rate(layout) for layout in layouts]),
            update_s=gradients * added + updated * update,
            bytes=np.array([state.total for state in states], dtype=np.int64),
        )

    def _rate(self, layout: Layout) -> float:
        """Seconds a byte of gradients over the devices that hold the first one's block."""
        cutting = frozenset(axis for axes in layout.cuts for axis in axes)
        if cutting not in self._rates:
            places = np.arange(len(self.devices))
            same = np.ones(len(places), dtype=bool)
            for axis in cutting:
                same &= places // axis.stride % axis.degree == 0
            group = [self.devices[place] for place in np.flatnonzero(same).tolist()]
            ways = exchange_of_gradients(self.problem, group).ways
            self._rates[cutting] = min(way.per_byte_s for way in ways)
        return self._rates[cutting]


def kept_bytes(kept: Sequence[SavedTensor], positions: MeshPositions) -> Integers:
    """Bytes on one device that backward keeps of a micro-batch, for each configuration of the node that keeps them.

    `SavedTensor.local_bytes` for all of them at once.
    """
    found = np.zeros(positions.configurations, dtype=np.int64)
    for each in kept:
        size = each.bytes // positions.degrees(axis for dimension in each.dimensions for axis in dimension)
        for window, extent in each.windows:
            degree = positions.degrees([window.axis])
            spans = np.array([window.span(window.count // parts) for parts in degree.tolist()], dtype=np.int64)
            size = np.where(degree > 1, size * spans // extent, size)
        found += size
    return found


@dataclass(eq=False, slots=True)
class NodeClass:
    """Nodes equal in all that their costs depend on; `node` is the first of them."""

    stage: StageContext
    node: int
    configurations: tuple[Splits, ...]
    layouts: LayoutTable
    """Of all classes together."""
    _operands: dict[int, TensorLayouts] = field(default_factory=dict)
    _results: dict[int, TensorLayouts] = field(default_factory=dict)

    @property
    def mesh_positions(self) -> MeshPositions:
        return self.layouts.mesh_positions_of(self.configurations)

    def reads(self, position: int) -> TensorLayouts:
        if position not in self._operands:
            graph, space = self.stage.graph, self.stage.uses[self.node].space
            found = self.layouts.operand(graph, graph.nodes[self.node], position, space, self.configurations)
            self._operands[position] = found
        return self._operands[position]

    def leaves(self, position: int) -> TensorLayouts:
        if position not in self._results:
            graph, space = self.stage.graph, self.stage.uses[self.node].space
            found = self.layouts.result(graph, graph.nodes[self.node], position, space, self.configurations)
            self._results[position] = found
        return self._results[position]


def node_classes(stage: StageContext) -> tuple[NodeClass, ...]:
    known: dict[Hashable, NodeClass] = {}
    spaces: dict[Hashable, tuple[Splits, ...]] = {}
    layouts = LayoutTable(len(stage.devices))
    found = []
    for node in stage.nodes:
        key = _key(stage, node)
        if key not in known:
            known[key] = NodeClass(stage, node, _configurations(stage, node, spaces), layouts)
        found.append(known[key])
    return tuple(found)


def _configurations(stage: StageContext, node: int, known: dict[Hashable, tuple[Splits, ...]]) -> tuple[Splits, ...]:
    if node in stage.options.allowed:
        return stage.options.allowed[node]
    space, outermost, group = stage.uses[node].space, stage.sample_axes[node], len(stage.devices)
    # Extents matter by the degrees that divide them; where several axes make up a dimension, also by what is left.
    axes = tuple((axis.name, axis.kind, math.gcd(axis.extent, group)) for axis in space.axes)
    tensors = (*space.operands, *space.results)
    mixed = tuple(tensor for tensor in tensors if tensor and any(len(dimension) > 1 for dimension in tensor))
    key = axes, outermost, (mixed, tuple(axis.extent for axis in space.axes)) if mixed else ()
    if key not in known:
        known[key] = configurations(space, group, outermost)
    return known[key]


def _key(stage: StageContext, node: int) -> Hashable:
    graph = stage.graph
    parameters = (
        (position, found.trainable)
        for position, name in stage.own_parameters(node).items()
        if (found := graph.parameter(name)) is not None
    )
    return (
        id(stage.uses[node]),
        stage.problem.work[node],
        stage.sample_axes[node],
        stage.options.allowed.get(node),
        tuple(parameters),
        tuple((each.bytes, each.dimensions) for each in stage.kept.get(node, ())),
        tuple((_is_reduced_alone(stage, name), name in stage.gradient) for name in graph.nodes[node].outputs),
    )


def _is_reduced_alone(stage: StageContext, name: str) -> bool:
    """True if shares of a value are added up though no node of the stage reads it."""
    return (
        bool(name)
        and name not in stage.readers
        and not (
            name in stage.options.given and name not in stage.graph.consumers() and not stage.graph.type_of(name).shape
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Cost of each configuration of a variable: seconds of a step, and bytes on a device.

    Of the seconds `gradients` are to exchange gradients once a step, `backward` is one micro-batch's backward.
    """

    seconds: Floats
    gradients: Floats
    backward: Floats
    memory: NDArray[np.int64]


def node_class_costs(kind: NodeClass, prices: Prices, reshard: ReshardTable) -> Costs:
    """Costs of a node's configurations, each by itself."""
    stage, node = kind.stage, kind.node
    options, problem = stage.options, stage.problem
    forward, backward = prices.seconds(node, stage.uses[node], kind.configurations, kind.mesh_positions)
    seconds = forward * (1 + options.recompute) + backward if problem.train else forward
    for position, name in enumerate(stage.graph.nodes[node].outputs):
        if _is_reduced_alone(stage, name):
            left = kind.leaves(position)
            size = stage.graph.type_of(name).bytes
            seconds = seconds + reshard.to_copies(left.layouts, size)[left.of] * times_run(stage, name)
    seconds = seconds * problem.micro_batches
    gradients = np.zeros_like(seconds)
    memory = np.zeros(len(seconds), dtype=np.int64)
    for position, name in stage.own_parameters(node).items():
        wanted = kind.reads(position)
        held = prices.holding(name, wanted.layouts)
        gradients += held.gradient_s[wanted.of]
        seconds = seconds + held.update_s[wanted.of]
        memory += held.bytes[wanted.of]
    if problem.train:
        # What recomputation brings back is that of one micro-batch at a time.
        micro_batches = 1 if options.recompute else options.in_flight
        memory += micro_batches * kept_bytes(stage.kept[node], kind.mesh_positions)
    return Costs(seconds + gradients, gradients, backward if problem.train else np.zeros_like(seconds), memory)


def times_run(stage: StageContext, value: str) -> int:
    """How often a micro-batch makes a change of layout of a value: forward, again for backward, and its transpose."""
    return 1 + stage.options.recompute + (value in stage.gradient)


def passing_bytes(kind: NodeClass) -> NDArray[np.int64]:
    """For each configuration the bytes of gradients of what a node reads and writes (`memory.gradient_workspace`)."""
    stage, node = kind.stage, kind.stage.graph.nodes[kind.node]
    found = np.zeros(len(kind.configurations), dtype=np.int64)
    if not stage.problem.train or stage.uses[kind.node].row.kind == "view":
        return found
    read = {name: kind.reads(place) for place, name in enumerate(node.inputs) if stage.graph.producer(name) is not None}
    written = {name: kind.leaves(place) for place, name in enumerate(node.outputs) if name}
    for name, each in (*read.items(), *written.items()):
        found += (each.elements * stage.widths[name])[each.of]
    return found


def more_bytes(first: NodeClass, by_first: SavedTensor, other: NodeClass, by_other: SavedTensor) -> NDArray[np.int64]:
    """By how much the block that `other` keeps of a value exceeds that of `first`; [of first, of other]."""
    own = kept_bytes([by_other], other.mesh_positions)
    difference: NDArray[np.int64] = np.maximum(own[None, :] - kept_bytes([by_first], first.mesh_positions)[:, None], 0)
    return difference
