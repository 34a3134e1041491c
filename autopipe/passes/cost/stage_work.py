"""The work of each stage: its nodes on the shards of one device, the collectives between them, and
the gradient reductions at the end of a step.

Backward runs the transpose of each collective whose value has a gradient, for example a
reduce-scatter for an all-gather. The model assigns it the cost of the collective.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.equality import node_labels
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, MeshAxes, merge_axes, mesh_axes_of, replicated_layout
from autopipe.ir.measured_costs import AffineTime, TensorCosts
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature, split_joint_axes
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import OpInstance, collective_element_bytes, op_instances
from autopipe.passes.analysis.resharding import (
    NodeLayouts,
    ValueRedistribution,
    node_layouts,
    parameters_to_replicate,
    received_layouts,
    with_redistributions,
)
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.analysis.training import matrix_parameters
from autopipe.passes.cost.communication import (
    FREE,
    CollectiveCost,
    all_gather,
    all_reduce,
    redistribution_seconds,
    reduce_scatter,
    reduction_cost,
)
from autopipe.passes.cost.measured import with_micro_batch_size


@dataclass(frozen=True, slots=True)
class NodeSharing:
    """How the devices of a stage divide one node: the degree of each split axis, and the layout of
    each operand and result. An entry for an absent operand or result is None.
    """

    degrees: dict[str, int]
    share: float
    """Fraction of the node that one device computes."""
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    read: tuple[int | None, ...]
    """Number of elements of each operand that one device reads."""
    written: tuple[int | None, ...]
    """Number of elements of each result that one device writes."""


@dataclass(frozen=True, slots=True)
class StageNode:
    """A node of a stage, and how the stage's devices divide the node."""

    index: int
    node: Node
    use: OpInstance
    sharing: NodeSharing

    @property
    def layouts(self) -> NodeLayouts:
        """The node with the layouts of its operands and results."""
        return NodeLayouts(self.index, self.node, self.sharing.operands, self.sharing.results)

    def read_bytes(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of each operand on one device, by name. `widths` contains the bytes per
        element of each value.
        """
        return _local_bytes(self.node.inputs, self.sharing.read, widths)

    def written_bytes(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of each result on one device, by name. `widths` contains the bytes per
        element of each value.
        """
        return _local_bytes(self.node.outputs, self.sharing.written, widths)


def _local_bytes(
    names: tuple[str, ...], elements: tuple[int | None, ...], widths: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes of the tensors `names`, from their numbers of elements and the bytes per
    element `widths`. A tensor whose number of elements is None is omitted.
    """
    return {
        name: count * widths[name]
        for name, count in zip(names, elements, strict=True)
        if count is not None
    }


@dataclass(frozen=True, slots=True)
class StageWork:
    """The nodes of a stage in topological order, and the layouts of its values on its devices.

    problem: the problem for the stage's micro-batch size; nodes and layouts refer to its graph.
    nodes: includes nodes that another stage also computes.
    given: layouts of the values that the stage computes and that other stages read or the graph
    outputs.
    received: layouts of the values that the stage reads and other stages compute.
    parameters: layouts of the parameters that the stage reads.

    A received value that nodes need in different layouts, and a parameter that nodes or stages need
    in different layouts, is replicated on all devices of the stage.
    """

    stage: Stage
    problem: Problem
    nodes: tuple[StageNode, ...]
    given: dict[str, Layout]
    received: dict[str, Layout]
    parameters: dict[str, Layout]
    parts: dict[str, int]
    """Number of different shards of each given value, received value and parameter."""

    @property
    def parameter_parts(self) -> list[tuple[str, int]]:
        """Pairs (name, number of different shards) of the stage's parameters."""
        return [(name, self.parts[name]) for name in self.parameters]


@memoize(2)
def stage_work(problem: Problem, placement: Placement) -> tuple[StageWork, ...]:
    """Return the work of each stage. Nodes on which no required output depends are omitted."""
    graph = problem.graph
    problems = {
        size: with_micro_batch_size(problem, size)
        for size in (stage.micro_batch_size for stage in placement.stages)
    }
    works = []
    for stage, plan in zip(
        placement.stages, assign_nodes(graph, placement, problem.wanted), strict=True
    ):
        own = problems[stage.micro_batch_size]
        group = len(stage.devices)
        assign = _stage_node_factory(own.graph)
        nodes = tuple(assign(index, splits, group) for index, splits in plan.nodes)
        taken = received_layouts(own.graph, [each.layouts for each in nodes], stage)
        written = {
            name: layout
            for each in nodes
            for name, layout in zip(each.node.outputs, each.sharing.results, strict=True)
            if layout is not None
        }
        given = {name: written[name] for name in plan.outputs if name in written}
        received = {
            name: layout for name, layout in taken.items() if graph.producer(name) is not None
        }
        parameters = {
            name: layout for name, layout in taken.items() if graph.parameter(name) is not None
        }
        parts = {
            name: layout.shard_count for name, layout in (given | received | parameters).items()
        }
        works.append(StageWork(stage, own, nodes, given, received, parameters, parts))
    torn = parameters_to_replicate([(work.stage.devices, work.parameters) for work in works])
    for work in works:
        for name in work.parameters.keys() & torn:
            work.parameters[name] = replicated_layout(graph.type_of(name).shape)
            work.parts[name] = 1
    return tuple(works)


@memoize(MAX_CACHED_GRAPHS)
def _stage_node_factory(graph: Graph) -> Callable[[int, tuple[Split, ...], int], StageNode]:
    """Return a function from (node index, splits, number of devices) to the node as these devices
    divide it. The function caches layouts, because many nodes are equal.
    """
    uses = op_instances(graph)
    labels = node_labels(graph)
    known: dict[tuple[int, tuple[Split, ...], int], NodeSharing] = {}

    def stage_node(index: int, splits: tuple[Split, ...], group: int) -> StageNode:
        """Return the node as `group` devices divide it by `splits`."""
        use = uses[index]
        key = (labels[index], splits, group)
        if key not in known:
            degrees = {split.axis: split.degree for split in splits}
            names = use.space.axis_sizes()
            # A split along an axis that the node lacks affects no layout. Here it only divides the
            # work; code generation later rejects it.
            form = node_layouts(
                graph, index, use.space, tuple(each for each in splits if each.axis in names), group
            )
            read, written = (
                tuple(None if layout is None else layout.local_elements for layout in layouts)
                for layouts in (form.operands, form.results)
            )
            share = 1.0 / math.prod(degrees.values())
            known[key] = NodeSharing(degrees, share, form.operands, form.results, read, written)
        return StageNode(index, graph.nodes[index], use, known[key])

    return stage_node


def stage_collective_seconds(work: StageWork) -> tuple[float, float]:
    """Return (forward, backward): the seconds of the collectives of one micro-batch inside a stage.

    The bytes of a collective follow from the types in which it sends elements at the problem's
    precision (`collective_element_bytes`).
    """
    graph = work.problem.graph
    cluster = work.problem.cluster
    devices = work.stage.devices
    forward = backward = 0.0
    if len(devices) < 2 or not (
        work.stage.gathers or any(each.sharing.degrees for each in work.nodes)
    ):
        return forward, backward
    differentiable = differentiable_values(graph)
    for exchange in redistributions_of(work):
        is_received = exchange.value in work.received
        width = collective_element_bytes(
            graph, work.problem.precision, exchange.value, is_received=is_received
        )
        seconds = redistribution_seconds(cluster, devices, exchange.step, width)
        forward += seconds
        backward += seconds * (exchange.value in differentiable)
    for each in work.nodes:
        if split_joint_axes(each.use.space, each.sharing.degrees):
            signature = signature_of(graph, each.node)
            there, back = statistics_seconds(
                cluster, devices, each.use, signature, each.sharing.degrees
            )
            forward += there
            backward += back
    return forward, backward


def redistributions_of(work: StageWork) -> Iterator[ValueRedistribution]:
    """Return the redistributions of values that lowering inserts between the nodes of a stage, in
    execution order.
    """
    graph = work.problem.graph
    nodes = [each.layouts for each in work.nodes]
    shares = work.given.keys() - graph.consumers().keys()
    taken = received_layouts(graph, nodes, work.stage)
    steps = with_redistributions(nodes, taken, work.given.keys(), shares, len(work.stage.devices))
    return (step for step in steps if isinstance(step, ValueRedistribution))


def statistics_seconds(
    cluster: Cluster,
    devices: tuple[int, ...],
    use: OpInstance,
    signature: Signature,
    degrees: Mapping[str, int],
) -> tuple[float, float]:
    """Return (forward, backward): the seconds in which the group `devices` reduces the statistics
    of a node, for example the maximum and sum of a softmax over a split axis.

    `degrees` maps each split axis of the node to its degree, outermost split first.
    """
    seconds = {False: 0.0, True: 0.0}
    mesh: MeshAxes = ()
    for statistic in use.row.statistics(signature, use.space, degrees):
        mesh = mesh or mesh_axes_of([Split(*item) for item in degrees.items()], len(devices))
        over = merge_axes(
            [place for axis, place in zip(degrees, mesh, strict=True) if axis in statistic.axes]
        )
        seconds[statistic.backward] += statistic.times * reduction_cost(
            cluster, devices, statistic.kind, over
        ).seconds(statistic.bytes)
    return seconds[False], seconds[True]


def gradient_reduction_cost(
    problem: Problem, group: Sequence[int], tensors: int = 0
) -> CollectiveCost:
    """Return the cost per step to all-reduce gradients among the devices `group`, as a function of
    the bytes of gradients on each device.

    With a sharded optimizer, gradients are reduce-scattered, and the cost includes the all-gather
    of the updated parameters. The cost also includes the measured time to copy `tensors` gradients
    into a bucket and back, if task times were measured.
    """
    if len(group) < 2:
        return FREE
    measured = (device.tasks for device in problem.cluster.device_types_among(group))
    buckets = [tasks.bucket for tasks in measured if tasks is not None] or [TensorCosts(0.0, 0.0)]
    own = AffineTime(
        max(each.per_tensor_s for each in buckets) * tensors,
        max(each.per_byte_s for each in buckets),
    )
    if not problem.optimizer.shard:
        return CollectiveCost(tuple(way + own for way in all_reduce(problem.cluster, group).ways))
    halves = reduce_scatter(problem.cluster, group), all_gather(problem.cluster, group)
    return CollectiveCost(
        tuple(scatter + gather + own for scatter in halves[0].ways for gather in halves[1].ways)
    )


def updated_fraction(problem: Problem, copies: float) -> float:
    """Return the fraction of a parameter's shard that one device updates, and for which the device
    stores optimizer state, if `copies` devices hold this shard. It is below 1 only with a sharded
    optimizer.
    """
    return 1 / copies if problem.optimizer.shard else 1.0


@memoize(2)
def first_shard_holders(works: Sequence[StageWork]) -> dict[str, tuple[int, ...]]:
    """Return, for each parameter by name, the devices of all stages that hold its first shard, in
    ascending order. The first shard is that of a stage's first device.
    """
    found: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for work in works:
        groups: dict[Layout, tuple[int, ...]] = {}
        for name, layout in work.parameters.items():
            if layout not in groups:
                places = layout.copies_of_first_shard(len(work.stage.devices))
                groups[layout] = tuple(sorted(work.stage.devices[place] for place in places))
            found[name].append(groups[layout])
    return {
        name: holding[0] if len(holding) == 1 else tuple(sorted(frozenset().union(*holding)))
        for name, holding in found.items()
    }


def device_group_key(cluster: Cluster, devices: Sequence[int]) -> Hashable:
    """Return a key for the group `devices`. Groups with equal keys have equal device types and
    links, in the order of `devices`.

    The key contains the type and the rank order of each device, and the level of the cluster that
    connects each pair of neighbours in ascending order. These levels determine the link between any
    two devices: it is the outermost level among those of the pairs between them.
    """
    ranked = sorted(devices)
    place = {device: index for index, device in enumerate(ranked)}
    levels = tuple(cluster.level(first, second) for first, second in itertools.pairwise(ranked))
    return (
        tuple(cluster.devices[device] for device in devices),
        tuple(place[device] for device in devices),
        levels,
    )


def check_unsharded_matrices(problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError if the optimizer is Muon and a stage shards a matrix. Muon updates each
    matrix as a whole, so it needs unsharded matrices.
    """
    if problem.optimizer.name != "muon" or not problem.train:
        return
    own = matrix_parameters(problem.graph)
    for number, work in enumerate(stage_work(problem, placement)):
        for name, parts in work.parameter_parts:
            if name in own and parts > 1:
                message = (
                    f"optimizer muon requires unsharded matrices, but stage {number} splits "
                    f"{name!r} into {parts} {plural(parts, 'shard')}"
                )
                raise InfeasibleError(
                    message, hint="use pipeline or data parallelism, which do not shard matrices"
                )
