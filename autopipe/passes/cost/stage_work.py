"""Work of each stage: its nodes as its group shares them, the collectives between them, and the sums of gradients at a
step's end. Backward runs each exchange's transpose, which costs the same, where gradients flow.

With ZeRO-1 (`Optimizer.shard`) each holder of a block gets the sum of a shard of the gradients and updates that; then
all gather the parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, MeshAxes, merged, mesh_of, replicated
from autopipe.ir.measured_costs import Affine
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature, joint_splits
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import OpInstance, uses_of
from autopipe.passes.analysis.resharding import Exchange, NodeLayouts, node_layouts, taken_layouts, with_exchanges
from autopipe.passes.analysis.stage_nodes import assign_nodes
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
from autopipe.passes.cost.roofline import bucket_line


@dataclass(frozen=True, slots=True)
class NodeSharing:
    """How a stage's group shares one use: how often each axis is cut, and how it holds each operand and result."""

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
    """One node on one stage."""

    index: int
    node: Node
    use: OpInstance
    sharing: NodeSharing


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage's nodes in topological order, recomputed ones included, and what its group holds of what they read.

    `problem` is the problem on the stage's own micro-batches: nodes and layouts are of its graph. `given` are values it
    computes that others want, `received` those that other stages compute, `parameters` those it reads, each with the
    number of parts in which the group holds it; `layouts` says how it holds parameters, `given_layouts` and
    `received_layouts` the others. Nodes that want one in different layouts, or stages a parameter, make every device
    hold it whole.
    """

    stage: Stage
    problem: Problem
    nodes: tuple[StageNode, ...]
    given: dict[str, int]
    received: dict[str, int]
    parameters: dict[str, int]
    layouts: dict[str, Layout]
    given_layouts: dict[str, Layout]
    received_layouts: dict[str, Layout]


@remembered(2)
def stage_work(problem: Problem, placement: Placement) -> tuple[StageWork, ...]:
    """The work of each stage, in order: nodes that no wanted output depends on are left out."""
    graph = problem.graph
    plans = assign_nodes(graph, placement, problem.wanted)
    problems = problems_of_stages(problem, placement)
    by_size = {own.micro_batch_size: own.graph for own in problems}
    assigners = {size: _assigner(own) for size, own in by_size.items()}
    assigned = [
        tuple(assigners[own.micro_batch_size](index, splits, len(stage.devices)) for index, splits in plan.nodes)
        for stage, own, plan in zip(placement.stages, problems, plans, strict=True)
    ]
    taken = [
        taken_layouts(own.graph, list(map(layouts_as, nodes))) for own, nodes in zip(problems, assigned, strict=True)
    ]
    torn = _torn(graph, taken)
    return tuple(
        _stage_work(own, stage, nodes, plan.outputs, _whole(graph, read, torn))
        for own, stage, plan, nodes, read in zip(problems, placement.stages, plans, assigned, taken, strict=True)
    )


def problems_of_stages(problem: Problem, placement: Placement) -> tuple[Problem, ...]:
    """For each stage the problem on its own micro-batches; equal sizes share one."""
    sizes = [stage.micro_batch_size for stage in placement.stages]
    by_size = {size: resized(problem, size) for size in sizes}
    return tuple(by_size[size] for size in sizes)


def layouts_as(each: StageNode) -> NodeLayouts:
    """The node with its layouts, as exchanges are found by."""
    return NodeLayouts(each.index, each.node, each.sharing.operands, each.sharing.results)


def _whole(graph: Graph, layouts: dict[str, Layout], names: frozenset[str]) -> dict[str, Layout]:
    """The layouts with those of `names` whole."""
    return layouts | {name: replicated(graph.type_of(name).shape) for name in names & layouts.keys()}


def _stage_work(
    problem: Problem, stage: Stage, nodes: tuple[StageNode, ...], outputs: tuple[str, ...], read: dict[str, Layout]
) -> StageWork:
    graph = problem.graph
    written = {
        name: layout
        for each in nodes
        for name, layout in zip(each.node.outputs, each.sharing.results, strict=True)
        if layout is not None
    }
    layouts = {name: layout for name, layout in read.items() if graph.parameter(name) is not None}
    given = {name: written[name] for name in outputs if name in written}
    received = {name: layout for name, layout in read.items() if graph.producer(name) is not None}
    return StageWork(
        stage=stage,
        problem=problem,
        nodes=nodes,
        given=_parts(given),
        received=_parts(received),
        parameters=_parts(layouts),
        layouts=layouts,
        given_layouts=given,
        received_layouts=received,
    )


def _parts(layouts: dict[str, Layout]) -> dict[str, int]:
    return {name: layout.parts for name, layout in layouts.items()}


def _torn(graph: Graph, read: list[dict[str, Layout]]) -> frozenset[str]:
    """Parameters that stages would cut differently: all of them hold these whole."""
    wanted: dict[str, set[tuple[int, ...]]] = {}
    for layouts in read:
        for name, layout in layouts.items():
            if graph.parameter(name) is not None:
                wanted.setdefault(name, set()).add(layout.local_shape())
    return frozenset(name for name, found in wanted.items() if len(found) > 1)


@remembered(GRAPHS)
def _assigner(graph: Graph) -> Callable[[int, tuple[Split, ...], int], StageNode]:
    """A function from a node, its splits and its group's size to the node as the group has it."""
    uses = uses_of(graph)
    known: dict[tuple[int, tuple[Split, ...], int], NodeSharing] = {}

    def assigned(index: int, splits: tuple[Split, ...], group: int) -> StageNode:
        use = uses[index]
        key = (id(use), splits, group)
        sharing = known.get(key)
        if sharing is None:
            sharing = known[key] = _sharing(graph, index, use, splits, group)
        return StageNode(index, graph.nodes[index], use, sharing)

    return assigned


def _sharing(graph: Graph, index: int, use: OpInstance, splits: tuple[Split, ...], group: int) -> NodeSharing:
    degrees = {split.axis: split.degree for split in splits}
    names = use.space.extents()
    # An axis that the node lacks only shares its work: code generation refuses it, by name.
    own = tuple(split for split in splits if split.axis in names)
    form = node_layouts(graph, index, use.space, own, group)
    share = 1.0 / math.prod(degrees.values())
    read, written = (
        tuple(None if layout is None else layout.local_elements for layout in layouts)
        for layouts in (form.operands, form.results)
    )
    return NodeSharing(degrees, share, form.operands, form.results, read, written)


@dataclass(frozen=True, slots=True)
class ExchangeSeconds:
    """Seconds of one micro-batch's collectives inside a stage."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: ExchangeSeconds) -> ExchangeSeconds:
        return ExchangeSeconds(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


def exchange_seconds(graph: Graph, cluster: Cluster, work: StageWork, gradient: Set[str]) -> ExchangeSeconds:
    """The collectives of a stage; `gradient` are the values that gradients flow through."""
    devices = work.stage.devices
    if len(devices) < 2 or not work.stage.splits:
        return ExchangeSeconds()
    total = ExchangeSeconds()
    for exchange in exchanges_of(graph, work):
        width = graph.type_of(exchange.value).dtype.itemsize
        seconds = relayout_seconds(cluster, devices, exchange.step, width)
        total += ExchangeSeconds(seconds, seconds * (exchange.value in gradient))
    for each in work.nodes:
        if joint_splits(each.use.space, each.sharing.degrees):
            total += statistics_seconds(
                cluster, devices, each.use, signature_of(graph, each.node), each.sharing.degrees
            )
    return total


def exchanges_of(graph: Graph, work: StageWork) -> Iterable[Exchange]:
    """The changes of layout that lowering makes between a stage's nodes."""
    nodes = list(map(layouts_as, work.nodes))
    shares = work.given.keys() - graph.consumers().keys()
    steps = with_exchanges(nodes, taken_layouts(graph, nodes), work.given.keys(), shares, len(work.stage.devices))
    return (step for step in steps if isinstance(step, Exchange))


def statistics_seconds(
    cluster: Cluster, devices: tuple[int, ...], use: OpInstance, signature: Signature, degrees: Mapping[str, int]
) -> ExchangeSeconds:
    """Seconds of the statistics that a node split by `degrees`, along joint axes among others, exchanges."""
    forward = backward = 0.0
    mesh: MeshAxes = ()
    for told in use.row.statistics(signature, use.space, degrees):
        mesh = mesh or mesh_of([Split(*item) for item in degrees.items()], len(devices))
        over = merged([place for axis, place in zip(degrees, mesh, strict=True) if axis in told.axes])
        seconds = told.times * reduction_cost(cluster, devices, told.kind, over).seconds(told.bytes)
        forward, backward = (forward, backward + seconds) if told.backward else (forward + seconds, backward)
    return ExchangeSeconds(forward, backward)


def exchange_of_gradients(problem: Problem, group: Sequence[int], tensors: int = 0) -> Cost:
    """Seconds, once a step, for gradients of these bytes a device of `group`; as many bytes are gathered.

    Copying into a bucket and back counts too, by the byte, and by the tensor where `tensors` is given.
    """
    if len(group) < 2:
        return FREE
    buckets = [bucket_line(device) for device in problem.cluster.kinds_among(group)]
    own = Affine(max(each.per_tensor_s for each in buckets) * tensors, max(each.per_byte_s for each in buckets))
    if not problem.optimizer.shard:
        return Cost(tuple(way + own for way in all_reduce(problem.cluster, group).ways))
    halves = reduce_scatter(problem.cluster, group), all_gather(problem.cluster, group)
    return Cost(tuple(scatter + gather + own for scatter in halves[0].ways for gather in halves[1].ways))


def updated_part(problem: Problem, copies: float) -> float:
    """The part that each of the devices with `copies` of a block updates, and keeps the optimizer's state of."""
    return 1 / copies if problem.optimizer.shard else 1.0


@remembered(2)
def holders_of(works: Sequence[StageWork]) -> dict[str, tuple[int, ...]]:
    """The devices, ascending, that hold the same block of each parameter, over all stages; of its parts the first."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for work in works:
        alike: dict[Layout, tuple[int, ...]] = {}
        for name, layout in work.layouts.items():
            if layout not in alike:
                places = layout.like_first(len(work.stage.devices))
                alike[layout] = tuple(sorted(work.stage.devices[place] for place in places))
            found.setdefault(name, []).append(alike[layout])
    return {name: groups[0] if len(groups) == 1 else _united(groups) for name, groups in found.items()}


def _united(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(frozenset().union(*groups)))


def reach(cluster: Cluster, devices: Sequence[int]) -> Hashable:
    """The devices' kinds, their order, and the levels that part neighbours: any two part at the outermost between."""
    ranked = sorted(devices)
    place = {device: index for index, device in enumerate(ranked)}
    levels = tuple(cluster.level(first, second) for first, second in itertools.pairwise(ranked))
    return tuple(cluster.devices[device] for device in devices), tuple(place[device] for device in devices), levels
