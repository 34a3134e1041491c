"""Cost of each configuration of a single node: its computation, the collectives that reduce its
statistics (for example the maximum and sum of a softmax over a split axis), and the parameters that
only this node reads.

This is t_l of PaSE (Elango, IPDPS 2021, section II). Nodes with equal costs form one class, and the
costs of a class are computed once: models of equal layers have few classes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.attention_kernels import min_cuda_capability
from autopipe.ir.equality import node_labels
from autopipe.ir.graph import Parameter
from autopipe.ir.layout import Layout, MeshAxis, holders_by_shard
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import no_collectives
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension
from autopipe.passes.analysis.gradients import (
    SavedTensor,
    differentiable_values,
    saved_tensors,
    workspace_of,
)
from autopipe.passes.analysis.operators import element_bytes, sample_axes
from autopipe.passes.cost.memory import parameter_state
from autopipe.passes.cost.roofline import (
    accumulate_seconds_per_byte,
    cast_seconds_per_byte,
    node_seconds,
    update_time,
)
from autopipe.passes.cost.stage_work import gradient_reduction_cost, statistics_seconds
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
    """Restrictions and settings for the costs of one stage. Indices of nodes and names of values
    are those of the full graph, not of the stage.
    """

    allowed: dict[int, tuple[Splits, ...]] = field(default_factory=dict)
    """The permitted configurations by node. A node without an entry may use all its
    configurations.
    """
    given: frozenset[str] = frozenset()
    """Names of the values that the stage outputs."""
    whole: frozenset[str] = frozenset()
    """Names of the parameters that must be replicated on all devices of the stage."""
    in_flight: int = 1
    """Number of micro-batches whose forward has run and whose backward has not."""
    recompute: bool = False
    """True if backward runs the forward again (activation recomputation)."""


NO_OPTIONS = StageOptions()


class StageContext:
    """The nodes of a stage on its devices, and cached data on which their costs depend. Indices of
    nodes are those of the full graph.
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
        self.labels = node_labels(graph)
        self.gradient: frozenset[str] = (
            differentiable_values(graph) if problem.train else frozenset()
        )
        self.widths = element_bytes(graph, problem.precision)
        self.layouts = LayoutTable(len(devices))
        self.reshard = ReshardTable(problem.cluster, devices)
        # Number of micro-batches whose saved tensors exist simultaneously. If backward recomputes
        # the tensors, they exist for one micro-batch only.
        self.kept_micro_batches = 1 if options.recompute else options.in_flight
        self.readers: dict[str, list[tuple[int, int]]] = {}
        """For each value: pairs (node, operand position) that read it. If a node reads the value at
        several positions with equal axes, only the first position has a pair.
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
        """For each node: the tensors that the node saves for backward. A tensor that several nodes
        save is listed only at the first of them.
        """
        self.kept_again: list[tuple[int, SavedTensor, int, SavedTensor]] = []
        """(first node, its saved tensor, other node, its saved tensor) for each tensor and each
        node after the first one that saves it.
        """
        saved = (
            saved_tensors(graph, problem.precision, min_cuda_capability(problem.cluster))
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
        """By degree: the seconds of 1 / degree of each node on the slowest device type, of shape
        [2, nodes]; row 0 is forward, row 1 is backward.
        """
        self._statistics: dict[tuple[int, int], Floats] = {}
        """Cached results of `_statistics_seconds`, by the label of a node and the id of a tuple of
        configurations. `layouts` stores the tuple, so its id stays valid.
        """
        self._rates: dict[frozenset[MeshAxis], float] = {}

    def is_shared_parameter(self, name: str) -> bool:
        """True if the layout of parameter `name` is a variable of the optimisation model: several
        operands read the parameter, or it must be replicated.
        """
        return len(self.readers[name]) > 1 or name in self.options.whole

    def own_parameters(self, node: int) -> dict[int, Parameter]:
        """Return, by operand position, the parameters whose layout follows from the configuration
        of `node`, because no other node reads them.
        """
        found: dict[str, tuple[int, Parameter]] = {}
        for position, name in enumerate(self.graph.nodes[node].inputs):
            parameter = self.graph.parameter(name)
            if parameter is not None and not self.is_shared_parameter(name):
                found.setdefault(name, (position, parameter))
        return dict(found.values())

    def is_reduced_without_reader(self, name: str) -> bool:
        """True if no node of the stage reads value `name`, so that its partial sums are reduced for
        other stages or for the outputs of the graph.

        False for a scalar loss, whose partial sums are added when the loss is reported.
        """
        if not name or name in self.readers:
            return False
        is_loss = name not in self.graph.consumers() and not self.graph.type_of(name).shape
        return not (is_loss and name in self.options.given)

    def layout_change_count(self, value: str) -> int:
        """Return how often a change of the layout of `value` runs per micro-batch: once in forward,
        once more with recomputation, and once for the gradient if the value has one.
        """
        return 1 + self.options.recompute + (value in self.gradient)

    def seconds(self, node: int, splits: tuple[Splits, ...]) -> Floats:
        """Return the seconds of a node's forward and backward for one micro-batch under each of the
        configurations `splits`, of shape [configurations, 2].

        The time of the slowest device type counts. The collectives that reduce the node's
        statistics are included.
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
        if use.row.statistics is not no_collectives:
            found += self._statistics_seconds(node, splits)
        return found

    def _statistics_seconds(self, node: int, splits: tuple[Splits, ...]) -> Floats:
        """Return the seconds of the collectives that reduce a node's statistics over its joint axes
        in forward and backward, under each of the configurations `splits`, of shape
        [configurations, 2].
        """
        key = self.labels[node], id(splits)
        if key not in self._statistics:
            use = self.samples.uses[node]
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

    def parameter_costs(
        self, name: str, layouts: Sequence[Layout]
    ) -> tuple[Floats, Floats, Integers]:
        """Return (gradient seconds, update seconds, bytes) of the parameter `name` for each of
        `layouts`.

        - gradient seconds: seconds per step to all-reduce its gradient over the devices that hold
          equal shards. Only bandwidth counts. Many parameters share one all-reduce, so its latency
          is attributed to none of them.
        - update seconds: seconds per step to accumulate its gradient over micro-batches, to create
          its 16-bit copies, and to update it.
        - bytes: parameter, 16-bit copy, gradient and optimizer state on one device.
        """
        parts = [layout.shard_count for layout in layouts]
        devices = len(self.devices)
        by_parts = {
            count: parameter_state(self.problem, ((name, count),), {name: devices // count})
            for count in set(parts)
        }
        states = [by_parts[count] for count in parts]
        gradients = np.array([state.gradient_bytes for state in states], dtype=float)
        updated = np.array([state.updated_bytes for state in states], dtype=float)
        kinds = self.kinds
        added = max(map(accumulate_seconds_per_byte, kinds)) * (self.problem.micro_batches - 1)
        # Seconds per gradient byte. All groups of devices with equal shards are of equal shape, so
        # the time of the group of the device at position 0 applies to all groups.
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
                    for algorithm in gradient_reduction_cost(self.problem, group).ways
                )
            rates.append(self._rates[mesh_axes])
        # One launch updates all parameters, so the time of the launch is attributed to no single
        # parameter. Only the time per byte counts.
        update = max(
            update_time(device, self.problem.optimizer.states).per_byte_s for device in kinds
        )
        casts = [
            state.low_precision_bytes + 2 * self.problem.micro_batches * state.cast_bytes
            for state in states
        ]
        cast = max(map(cast_seconds_per_byte, kinds)) * np.array(casts, dtype=float)
        return (
            gradients * np.array(rates),
            gradients * added + updated * update + cast,
            np.array([state.total for state in states], dtype=np.int64),
        )


def saved_bytes_by_configuration(kept: Sequence[SavedTensor], positions: MeshPositions) -> Integers:
    """Return the bytes on one device of the tensors `kept`, which one node saves for the backward
    of one micro-batch, under each configuration of the node, of shape [configurations].

    `positions` are the mesh positions of these configurations. This is `SavedTensor.local_bytes`
    for all configurations at once.
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
class VariableCosts:
    """Costs of each choice of a variable of the optimisation model, as arrays of shape [choices].

    seconds: all seconds of a step.
    gradients: the part of `seconds` in which gradients are all-reduced.
    backward: seconds of the backward of one micro-batch.
    memory: bytes on one device.
    """

    seconds: Floats
    gradients: Floats
    backward: Floats
    memory: Integers


@dataclass(frozen=True, slots=True, eq=False)
class NodeClass:
    """Nodes of a stage with equal costs; `node` is the first of them, and `configurations` are its
    configurations.
    """

    stage: StageContext
    node: int
    configurations: tuple[Splits, ...]

    @property
    def mesh_positions(self) -> MeshPositions:
        """The mesh axes of the configurations on the stage's devices."""
        return self.stage.layouts.mesh_positions_of(self.configurations)

    def reads(self, position: int) -> TensorLayouts:
        """Return the layouts in which the node needs its operand at `position`, under each of its
        configurations.
        """
        graph = self.stage.graph
        space = self.stage.samples.uses[self.node].space
        shape = graph.type_of(graph.nodes[self.node].inputs[position]).shape
        return self.stage.layouts.operand(space, position, shape, self.configurations)

    def leaves(self, position: int) -> TensorLayouts:
        """Return the layouts in which the node produces its result at `position`, under each of its
        configurations. A layout states whether the result is a partial sum or mean.
        """
        graph = self.stage.graph
        space = self.stage.samples.uses[self.node].space
        shape = graph.type_of(graph.nodes[self.node].outputs[position]).shape
        return self.stage.layouts.result(space, position, shape, self.configurations)

    def costs(self) -> VariableCosts:
        """Return the costs of each configuration: computation, parameters that only this node
        reads, and saved tensors. Changes of layout between nodes are not included.
        """
        stage = self.stage
        problem = self.stage.problem
        forward, backward = stage.seconds(self.node, self.configurations).T
        if not problem.train:
            backward = np.zeros_like(forward)
        seconds = forward * (1 + stage.options.recompute) + backward if problem.train else forward
        for position, name in enumerate(stage.graph.nodes[self.node].outputs):
            if stage.is_reduced_without_reader(name):
                left = self.leaves(position)
                size = stage.graph.type_of(name).elements * stage.widths[name]
                added = stage.reshard.to_copies(left.layouts, size)
                seconds = seconds + added[left.layout_of] * stage.layout_change_count(name)
        seconds = seconds * problem.micro_batches
        gradients = np.zeros_like(seconds)
        memory = np.zeros(len(seconds), dtype=np.int64)
        for position, parameter in stage.own_parameters(self.node).items():
            wanted = self.reads(position)
            gradient_s, update_s, held = stage.parameter_costs(parameter.value.name, wanted.layouts)
            gradients += gradient_s[wanted.layout_of]
            seconds = seconds + update_s[wanted.layout_of]
            memory += held[wanted.layout_of]
        if problem.train:
            memory += stage.kept_micro_batches * saved_bytes_by_configuration(
                stage.kept[self.node], self.mesh_positions
            )
        return VariableCosts(seconds + gradients, gradients, backward, memory)

    def temporary_bytes(self) -> Integers:
        """Return the bytes of temporary memory on one device while the backward of the node runs,
        under each configuration, of shape [configurations]; 0 in inference.

        These are the gradients of the results, the gradients of the operands that nodes compute,
        and the temporary tensors of the operator.
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
        return found + self._scratch_bytes()

    def _scratch_bytes(self) -> Integers:
        """Return the bytes of the operator's temporary tensors on one device under each
        configuration.
        """
        graph = self.stage.graph
        use = self.stage.samples.uses[self.node]
        precision = self.stage.problem.precision
        degrees = ({split.axis: split.degree for split in splits} for splits in self.configurations)
        found = (workspace_of(graph, precision, self.node, use, each) for each in degrees)
        return np.array([each.samples + each.weight for each in found], dtype=np.int64)


def node_classes(stage: StageContext) -> dict[int, NodeClass]:
    """Return the class of each node of the stage, by node."""
    known: dict[Hashable, NodeClass] = {}
    spaces: dict[Hashable, tuple[Splits, ...]] = {}
    found = {}
    for node in stage.nodes:
        key = (  # The label of the node, and each other property that affects its costs.
            stage.labels[node],
            stage.problem.work[node],
            stage.samples.axes[node],
            stage.options.allowed.get(node),
            tuple(
                (position, each.trainable) for position, each in stage.own_parameters(node).items()
            ),
            tuple((each.bytes, each.dimensions) for each in stage.kept.get(node, ())),
            tuple(
                (stage.is_reduced_without_reader(name), name in stage.gradient)
                for name in stage.graph.nodes[node].outputs
            ),
            tuple(
                stage.graph.producer(name) is not None for name in stage.graph.nodes[node].inputs
            ),
        )
        if key not in known:
            known[key] = NodeClass(stage, node, _configurations(stage, node, spaces))
        found[node] = known[key]
    return found


def _configurations(
    stage: StageContext, node: int, known: dict[Hashable, tuple[Splits, ...]]
) -> tuple[Splits, ...]:
    """Return the configurations of a node that the stage permits. `known` caches the configurations
    of nodes without a restriction, so that equal nodes get one object.
    """
    if node in stage.options.allowed:
        return stage.options.allowed[node]
    space = stage.samples.uses[node].space
    outermost = stage.samples.axes[node]
    group = len(stage.devices)
    # Possible degrees are the common divisors of an axis size and the number of devices, which
    # their greatest common divisor determines. If a dimension merges several axes, the axis sizes
    # also decide whether a split assigns one range to each device, so the key contains the sizes.
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
