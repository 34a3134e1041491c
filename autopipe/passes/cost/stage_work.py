"""Work of each stage: its nodes as its group shares them, the collectives between them, and the
sums of gradients at a step's end. Backward runs each exchange's transpose, which costs the same,
where gradients flow.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, MeshAxes, merge_axes, mesh_axes_of, replicated
from autopipe.ir.measured_costs import Affine, TensorCosts
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature, joint_splits
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import OpInstance, exchanged_element_bytes, uses_of
from autopipe.passes.analysis.resharding import (
    NodeLayouts,
    ValueRedistribution,
    node_layouts,
    parameters_to_replicate,
    received_layouts,
    with_redistributions,
)
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.analysis.training import matrices
from autopipe.passes.cost.communication import (
    FREE,
    Cost,
    all_gather,
    all_reduce,
    reduce_scatter,
    reduction_cost,
    relayout_seconds,
)
from autopipe.passes.cost.measured import resized


@dataclass(frozen=True, slots=True)
class NodeSharing:
    """How a stage's group shares one use: how often each axis is cut, and how it holds each operand
    and result.
    """

    degrees: dict[str, int]
    share: float
    """The part of the node that one device computes."""
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    read: tuple[int | None, ...]
    """Elements that one device reads of each operand."""
    written: tuple[int | None, ...]
    """Elements that it writes of each result."""


@dataclass(frozen=True, slots=True)
class StageNode:
    index: int
    node: Node
    use: OpInstance
    sharing: NodeSharing

    @property
    def layouts(self) -> NodeLayouts:
        return NodeLayouts(self.index, self.node, self.sharing.operands, self.sharing.results)

    def read_bytes(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Bytes on one device of what it reads; `widths` are bytes an element."""
        return _local_bytes(self.node.inputs, self.sharing.read, widths)

    def written_bytes(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Bytes on one device of what it writes."""
        return _local_bytes(self.node.outputs, self.sharing.written, widths)


def _local_bytes(
    names: tuple[str, ...], elements: tuple[int | None, ...], widths: Mapping[str, int]
) -> dict[str, int]:
    return {
        name: count * widths[name]
        for name, count in zip(names, elements, strict=True)
        if count is not None
    }


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage's nodes in topological order, recomputed ones included, and how its group holds what
    they read and give.

    `problem` is the problem on the stage's own micro-batches: nodes and layouts are of its graph.
    `given` are values it computes that others want, `received` those that other stages compute,
    `parameters` those it reads. Nodes that want one in different layouts, or stages a parameter,
    make every device hold it whole.
    """

    stage: Stage
    problem: Problem
    nodes: tuple[StageNode, ...]
    given: dict[str, Layout]
    received: dict[str, Layout]
    parameters: dict[str, Layout]
    parts: dict[str, int]
    """In how many parts the group holds each of those."""

    @property
    def parameter_parts(self) -> list[tuple[str, int]]:
        return [(name, self.parts[name]) for name in self.parameters]


@remembered(2)
def stage_work(problem: Problem, placement: Placement) -> tuple[StageWork, ...]:
    """The work of each stage, in order: nodes that no wanted output depends on are left out."""
    graph = problem.graph
    problems = {
        size: resized(problem, size)
        for size in (stage.micro_batch_size for stage in placement.stages)
    }
    works = []
    for stage, plan in zip(
        placement.stages, assign_nodes(graph, placement, problem.wanted), strict=True
    ):
        own = problems[stage.micro_batch_size]
        group = len(stage.devices)
        assign = _assigner(own.graph)
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
    for work in works:  # All stages hold these whole.
        for name in work.parameters.keys() & torn:
            work.parameters[name], work.parts[name] = replicated(graph.type_of(name).shape), 1
    return tuple(works)


@remembered(GRAPHS)
def _assigner(graph: Graph) -> Callable[[int, tuple[Split, ...], int], StageNode]:
    """A function from a node, its splits and its group's size to the node as the group has it."""
    uses = uses_of(graph)
    known: dict[tuple[int, tuple[Split, ...], int], NodeSharing] = {}

    def assigned(index: int, splits: tuple[Split, ...], group: int) -> StageNode:
        use = uses[index]
        key = (id(use), splits, group)
        if key not in known:
            degrees = {split.axis: split.degree for split in splits}
            names = use.space.axis_sizes()
            # An axis that the node lacks only shares its work: code generation refuses it, by name.
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

    return assigned


def exchange_seconds(work: StageWork) -> tuple[float, float]:
    """Return (forward, backward): the seconds of the collectives of one micro-batch inside a stage.

    Each collective is costed at the bytes that are sent at the problem's precision
    (`exchanged_element_bytes`).
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
    for exchange in exchanges_of(work):
        is_received = exchange.value in work.received
        width = exchanged_element_bytes(
            graph, work.problem.precision, exchange.value, is_received=is_received
        )
        seconds = relayout_seconds(cluster, devices, exchange.step, width)
        forward += seconds
        backward += seconds * (exchange.value in differentiable)
    for each in work.nodes:
        if joint_splits(each.use.space, each.sharing.degrees):
            signature = signature_of(graph, each.node)
            there, back = statistics_seconds(
                cluster, devices, each.use, signature, each.sharing.degrees
            )
            forward += there
            backward += back
    return forward, backward


def exchanges_of(work: StageWork) -> Iterator[ValueRedistribution]:
    """The changes of layout that lowering makes between a stage's nodes."""
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
    """Seconds, forwards and backwards, of the statistics that a node exchanges which is split by
    `degrees`, along joint axes among others.
    """
    seconds = {False: 0.0, True: 0.0}
    mesh: MeshAxes = ()
    for told in use.row.statistics(signature, use.space, degrees):
        mesh = mesh or mesh_axes_of([Split(*item) for item in degrees.items()], len(devices))
        over = merge_axes(
            [place for axis, place in zip(degrees, mesh, strict=True) if axis in told.axes]
        )
        seconds[told.backward] += told.times * reduction_cost(
            cluster, devices, told.kind, over
        ).seconds(told.bytes)
    return seconds[False], seconds[True]


def exchange_of_gradients(problem: Problem, group: Sequence[int], tensors: int = 0) -> Cost:
    """Seconds, once a step, for gradients of these bytes a device of `group`; as many bytes are
    gathered.

    Copying into a bucket and back counts too, by the byte, and by the tensor where `tensors` is
    given.
    """
    if len(group) < 2:
        return FREE
    measured = (device.tasks for device in problem.cluster.kinds_among(group))
    buckets = [tasks.bucket for tasks in measured if tasks is not None] or [TensorCosts(0.0, 0.0)]
    own = Affine(
        max(each.per_tensor_s for each in buckets) * tensors,
        max(each.per_byte_s for each in buckets),
    )
    if not problem.optimizer.shard:
        return Cost(tuple(way + own for way in all_reduce(problem.cluster, group).ways))
    halves = reduce_scatter(problem.cluster, group), all_gather(problem.cluster, group)
    return Cost(
        tuple(scatter + gather + own for scatter in halves[0].ways for gather in halves[1].ways)
    )


def updated_part(problem: Problem, copies: float) -> float:
    """The part that each of the devices with `copies` of a block updates, and keeps the optimizer's
    state of.
    """
    return 1 / copies if problem.optimizer.shard else 1.0


@remembered(2)
def holders_of(works: Sequence[StageWork]) -> dict[str, tuple[int, ...]]:
    """The devices, ascending, that hold the same block of each parameter, over all stages; of its
    parts the first.
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


def reach(cluster: Cluster, devices: Sequence[int]) -> Hashable:
    """The devices' kinds, their order, and the levels that part neighbours: any two part at the
    outermost between.
    """
    ranked = sorted(devices)
    place = {device: index for index, device in enumerate(ranked)}
    levels = tuple(cluster.level(first, second) for first, second in itertools.pairwise(ranked))
    return (
        tuple(cluster.devices[device] for device in devices),
        tuple(place[device] for device in devices),
        levels,
    )


def check_whole_matrices(problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError where the optimizer needs matrices that a stage cuts."""
    if problem.optimizer.name != "muon" or not problem.train:
        return
    own = matrices(problem.graph)
    for number, work in enumerate(stage_work(problem, placement)):
        for name, parts in work.parameter_parts:
            if name in own and parts > 1:
                message = (
                    f"optimizer muon needs whole matrices, and stage {number} "
                    f"cuts {name!r} in {parts} {plural(parts, 'part')}"
                )
                raise InfeasibleError(
                    message, hint="pipelines and data parallelism leave them whole"
                )
