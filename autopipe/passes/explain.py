"""Explanations of a plan: reports of devices and nodes, and the step times of edited placements and
of changed problems.

The step time of an edited placement is that under the plan's scheduler.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopipe.ir.batch import resize_batch
from autopipe.ir.errors import CANDIDATE_ERRORS, ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase
from autopipe.ir.space import AxisKind
from autopipe.ir.timeline import Prediction, Span, Timeline, Transfer
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import checked_splits
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import SampleAxes, collective_element_bytes, sample_axes
from autopipe.passes.cost.communication import redistribution_seconds
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import StageWork, redistributions_of, stage_work
from autopipe.passes.open_options import with_open_options
from autopipe.passes.pipeline import (
    PlanResult,
    PredictedPlacement,
    Request,
    Runner,
    make_plan,
    predict_placement,
    schedule_placed,
    strategy_and_scheduler,
)
from autopipe.passes.schedule.limits import lower_bound
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Breakdown of the step of one device. The seconds of `tasks`, `gradients_s`, `update_s`,
    `waits`, `messages_s` and `end_s` add up to the step time.
    """

    device: int
    stages: tuple[int, ...]
    tasks: tuple[tuple[str, int, float], ...]
    """Triples (stage and phase, number of tasks, total seconds). `2F` stands for the forwards of
    stage 2.
    """
    gradients_s: float
    update_s: float
    waits: tuple[tuple[int, float], ...]
    """Pairs (other device, seconds of waiting for its computation), longest first."""
    messages_s: float
    """Seconds of waiting for P2P messages in transit."""
    end_s: float
    """Seconds of waiting at the end of the step, for the gradients of other devices or for the last
    device.
    """
    first_s: float
    """Start time of the first task, in seconds after the start of the step."""
    static_bytes: int
    peak_bytes: int

    @property
    def busy_s(self) -> float:
        """Seconds in which the device computes tasks, reduces gradients or updates parameters."""
        return sum(seconds for _, _, seconds in self.tasks) + self.gradients_s + self.update_s


def device_report(
    placement: Placement, prediction: Prediction, timeline: Timeline, device: int
) -> DeviceReport:
    """Return the report of device `device`. `prediction` and `timeline` are the costs of the stages
    and the simulated step of `placement`.
    """
    spans = [span for span in timeline.spans if span.device == device]
    stages = tuple(index for index, stage in enumerate(placement.stages) if device in stage.devices)
    waits, messages = _waiting_seconds(placement, timeline, spans)
    gradients = sum(prediction.stages[stage].gradient_s for stage in stages)
    update = sum(prediction.stages[stage].update_s for stage in stages)
    last = max((span.end for span in spans), default=0.0)
    tasks: dict[tuple[int, Phase], tuple[int, float]] = {}
    for span in spans:
        count, seconds = tasks.get((span.task.stage, span.task.phase), (0, 0.0))
        tasks[span.task.stage, span.task.phase] = count + 1, seconds + (span.end - span.start)
    return DeviceReport(
        device=device,
        stages=stages,
        tasks=tuple((f"{stage}{phase.value}", *each) for (stage, phase), each in tasks.items()),
        gradients_s=gradients,
        update_s=update,
        waits=tuple(sorted(waits.items(), key=lambda each: (-each[1], each[0]))),
        messages_s=messages,
        end_s=timeline.end - last - gradients - update,
        first_s=spans[0].start if spans else 0.0,
        static_bytes=timeline.static_memory[device],
        peak_bytes=timeline.peak_memory[device],
    )


def _waiting_seconds(
    placement: Placement, timeline: Timeline, spans: list[Span]
) -> tuple[Mapping[int, float], float]:
    """Return (waits, messages) of one device, whose tasks are `spans`.

    waits: by index of another device, the seconds of waiting for the computation of that device. A
    wait without a known cause has the index of the device itself.
    messages: seconds of waiting for messages in transit.

    The cause of a wait is found by equal times: a task starts at exactly the floating-point time at
    which the task or message for which it waited ends.
    """
    ends: defaultdict[float, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        ends[span.end].append(span)
    arrivals: defaultdict[float, list[Transfer]] = defaultdict(list)
    for transfer in timeline.transfers:
        arrivals[transfer.end].append(transfer)
    waits: defaultdict[int, float] = defaultdict(float)
    messages = free = 0.0
    for span in spans:
        gap = span.start - free
        free = span.end
        group = placement.stages[span.task.stage].devices
        if gap <= 0.0:
            continue
        brought = [each for each in arrivals.get(span.start, ()) if each.target in group]
        if brought:
            last = max(brought, key=lambda each: each.start)
            flying = min(gap, last.end - last.start)
            messages += flying
            if gap > flying:
                waits[last.source] += gap - flying
        else:
            before = [
                each.device for each in ends.get(span.start, ()) if each.device != span.device
            ]
            own = [device for device in before if device in group]
            waits[min(own or before, default=span.device)] += gap
    return waits, messages


_MOST_S = 5.0
"""Maximum search time of a strategy, in seconds, with which it is run again for each change of the
problem.
"""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change of the problem that a plan solves (`what`, in words), and the throughput with it."""

    what: str
    planned_again: bool
    """True if the strategy was run again. Otherwise the plan's placement was scheduled again."""
    samples_per_s: float | None = None
    refused: str | None = None
    """Reason why the changed problem has no step; None if it has one."""


def request_with_open_options(planned: PlanResult) -> Request:
    """Return the request of a plan, with all options open (None) that the strategy chose for the
    plan.
    """
    strategy, _ = strategy_and_scheduler(planned.request)
    return replace(planned.request, strategy=with_open_options(strategy, planned.plan))


def what_if_requests(planned: PlanResult) -> Iterator[tuple[str, Request]]:
    """Yield changes of the plan's problem as pairs (change in words, changed request): twice the
    memory, twice the bandwidth, and more micro-batches.

    If the host launches the kernels of some stages more slowly than devices run them, also yield
    fewer micro-batches and a host without launch overhead.
    """
    request = request_with_open_options(planned)
    problem = planned.problem
    cluster = request.cluster
    if request.memory_limit is None:
        roomy = tuple(
            replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices
        )
        yield "twice the memory", replace(request, cluster=replace(cluster, devices=roomy))
    else:
        yield "twice the memory", replace(request, memory_limit=2 * request.memory_limit)
    for inside, where in ((True, "inside nodes"), (False, "between nodes")):
        faster = cluster.with_bandwidth(2, inside)
        if faster != cluster:
            yield f"twice the bandwidth {where}", replace(request, cluster=faster)
    count = problem.micro_batches
    size = problem.batch_size
    if size % (2 * count) == 0:
        halves = replace(request, batch_size=size, micro_batches=2 * count, micro_batch_size=None)
        yield "twice the micro-batches, of half the size", halves
    longer = replace(request, batch_size=2 * size, micro_batches=2 * count, micro_batch_size=None)
    yield "twice the micro-batches, of the same size", longer
    if planned.plan.host_bound_stages:
        if count % 2 == 0:
            doubled = replace(
                request, batch_size=size, micro_batches=count // 2, micro_batch_size=None
            )
            yield "half the micro-batches, of twice the size", doubled
        free = tuple(replace(device, host_launch_s=0.0) for device in cluster.devices)
        yield (
            "no time of the host, as with launch --cuda-graphs",
            replace(request, cluster=replace(cluster, devices=free)),
        )


def is_quick(planned: PlanResult) -> bool:
    """True if the strategy took at most `_MOST_S` seconds for the plan, so that it can be run again
    for each change of the problem.
    """
    strategy, _ = strategy_and_scheduler(planned.request)
    return dict(planned.plan.summary.search_time_s).get(strategy.name, 0.0) <= _MOST_S


def _samples_per_s(samples: int, seconds: float) -> float:
    """Return the samples per second of a step of `samples` samples that takes `seconds`; 0 if it
    takes no time, as in `Summary.samples_per_s`.
    """
    return samples / seconds if seconds else 0.0


def what_if_result(planned: PlanResult, what: str, request: Request, again: bool) -> WhatIf:
    """Return the throughput of the plan's problem with a change, or the reason why it has no step.

    `what` is the change in words, and `request` the changed request. The throughput is the maximum
    of that of the plan's placement and, if `again`, of a new plan. The plan's placement is tried if
    the change keeps the number of devices and the micro-batch size: with a new schedule and, if the
    number of micro-batches is unchanged, with the plan's schedule. It is tried even with `again`,
    because a heuristic search can find a worse plan under better conditions.
    """
    problem = planned.problem
    count = request.micro_batches or problem.micro_batches
    size = request.batch_size or problem.batch_size
    rates: list[float] = []
    refused = "asks for another placement, and this one was long searched for"
    if request.cluster.size == problem.cluster.size and size // count == problem.micro_batch_size:
        limit = request.memory_limit
        changed = replace(
            problem,
            cluster=request.cluster,
            memory_limit=limit,
            micro_batches=count,
            batch_size=size,
        )
        try:
            placed = predict_placement(planned.model, changed, planned.plan.placement, Runner())
            if count == problem.micro_batches:
                schedule = planned.plan.schedule
                kept = simulate(schedule, placed.graph.stage_devices, placed.prediction)
                rates.append(_samples_per_s(size, kept.end))
            rates.append(_samples_per_s(size, _timeline(planned, placed).end))
        except CANDIDATE_ERRORS as error:
            refused = error.line
    if again:
        try:
            rates.append(make_plan(request).plan.summary.samples_per_s)
        except CANDIDATE_ERRORS as error:
            refused = error.line
    return WhatIf(what, again, max(rates)) if rates else WhatIf(what, again, refused=refused)


def _timeline(planned: PlanResult, placed: PredictedPlacement) -> Timeline:
    """Return the simulated step of `placed`, a placement with its costs, under the plan's
    scheduler.
    """
    runner = Runner()
    (_, scheduler) = strategy_and_scheduler(planned.request)
    return schedule_placed(placed, scheduler, runner)[1].timeline


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that the node of a report reads or writes, the node at the other end, and the
    communication of the value between both.
    """

    value: str
    reads: bool
    """True if the node of the report reads the value, False if it writes the value."""
    node: str
    """Name of the node at the other end; "" if there is none, as for inputs and outputs of the
    model and for parameters.
    """
    stage: int | None
    """Stage of the node at the other end; None if there is none."""
    bytes: int
    """Bytes of the unsharded value, for one micro-batch of the stage."""
    exchanges: tuple[str, ...]
    """Kinds of the collectives with which the devices of the report's stage redistribute the value
    to the layouts in which nodes read it.
    """
    exchange_s: float
    """Seconds of these collectives per micro-batch, forward and backward together."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Stage, devices, splits, costs and communication of one node of a plan."""

    node: int
    name: str
    op: str
    stage: int
    devices: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    """Fraction of the node that each device computes."""
    forward_s: float
    """Seconds of forward per micro-batch on the slowest device type of the stage."""
    backward_s: float
    """Seconds of backward per micro-batch on the slowest device type of the stage."""
    recomputed: bool
    """True if each stage that reads the node's values computes the node itself, because that costs
    less than sending the values.
    """
    edges: tuple[Edge, ...]
    """Values that the node reads, then values that it writes, one entry per reader."""


def node_report(problem: Problem, placement: Placement, node: int) -> NodeReport:
    """Return the report of the graph's node with index `node` in its first stage."""
    stage_of = placement.stage_of()
    index = stage_of[node]
    stage = placement.stages[index]
    work = stage_work(problem, placement)[index]
    own = work.problem
    graph = work.problem.graph
    assigned = next((each for each in work.nodes if each.index == node), None)
    share = 1.0 if assigned is None else assigned.sharing.share
    kinds = {own.cluster.devices[device] for device in stage.devices}
    seconds = [node_seconds([own.work[node]], device, own.precision, share) for device in kinds]
    forward, backward = (max(float(each[phase][0]) for each in seconds) for phase in (0, 1))
    edges = []
    for value in dict.fromkeys(filter(None, graph.nodes[node].inputs)):
        edges.append(_node_edge(work, value, True, graph.producer(value), stage_of))
    for value in filter(None, graph.nodes[node].outputs):
        readers: tuple[int | None, ...] = graph.consumers().get(value, ())
        edges += (_node_edge(work, value, False, reader, stage_of) for reader in readers or (None,))
    return NodeReport(
        node=node,
        name=graph.nodes[node].name,
        op=graph.nodes[node].op,
        stage=index,
        devices=stage.devices,
        splits=stage.splits_of(node),
        share=share,
        forward_s=forward,
        backward_s=backward if problem.train else 0.0,
        recomputed=node in recomputed_nodes(problem.graph),
        edges=tuple(edges),
    )


def _node_edge(
    work: StageWork, value: str, reads: bool, other: int | None, stage_of: Mapping[int, int]
) -> Edge:
    """Return the edge of value `value` between a node of the stage `work` and the node `other`, or
    None for no node. `reads` is True if the stage's node reads the value. `stage_of` maps nodes to
    stages.
    """
    graph = work.problem.graph
    group = work.stage.devices
    steps = (
        [step.step for step in redistributions_of(work) if step.value == value]
        if len(group) > 1
        else []
    )
    width = collective_element_bytes(
        graph, work.problem.precision, value, is_received=value in work.received
    )
    directions = 2 if value in differentiable_values(graph) and work.problem.train else 1
    seconds = directions * sum(
        redistribution_seconds(work.problem.cluster, group, step, width) for step in steps
    )
    kinds = tuple(dict.fromkeys(step.kind for step in steps))
    name, stage = ("", None) if other is None else (graph.nodes[other].name, stage_of[other])
    return Edge(value, reads, name, stage, graph.type_of(value).bytes, kinds, seconds)


_MOST = 6
"""Maximum number of edited placements that `best_changes` schedules."""


@dataclass(frozen=True, slots=True)
class Change:
    """An edited placement, the edit in words, and the result of scheduling the placement."""

    kind: str
    """Group of similar edits. Only the best edit of each group is reported."""
    what: str
    """The edit in words."""
    placement: Placement
    step_s: float | None = None
    """Seconds of a step; None before scheduling and if there is no step."""
    peak_memory_bytes: int | None = None
    """Maximum over the devices of their peak memory."""
    refused: str | None = None
    """Reason why there is no step; None before scheduling and if there is a step."""

    @property
    def rank(self) -> float:
        """Sort key: the seconds of the step; infinite if there is no step."""
        return math.inf if self.step_s is None else self.step_s


def scheduled_change(planned: PlanResult, change: Change) -> Change:
    """Return the change with its step time and peak memory under the plan's scheduler, or with the
    reason why there is no step.
    """
    try:
        timeline = _timeline(planned, _predicted_placement(planned, change.placement))
    except CANDIDATE_ERRORS as error:
        return replace(change, refused=error.line)
    return replace(change, step_s=timeline.end, peak_memory_bytes=max(timeline.peak_memory))


def best_changes(planned: PlanResult, changes: Iterable[Change], wanted: int) -> tuple[Change, ...]:
    """Return the best changes of different kinds, fastest first. Changes for which scheduling fails
    come last.

    The step time of all changes is first estimated with the order of tasks in the plan's schedule.
    Then the changes with the best estimate of their kind are scheduled, best estimate first, until
    `wanted` of them have a step or `_MOST` are scheduled. Only these are returned.
    """
    by_placement: dict[Placement, Change] = {}
    for change in changes:
        by_placement[change.placement] = by_placement.pop(change.placement, change)
    weighed = sorted(
        ((_estimated_seconds(planned, each), each) for each in by_placement.values()),
        key=lambda each: each[0],
    )
    best: dict[str, Change] = {}
    for weight, change in weighed:
        if weight < math.inf:
            best.setdefault(change.kind, change)
    found: list[Change] = []
    for change in list(best.values())[:_MOST]:
        if sum(each.step_s is not None for each in found) < wanted:
            found.append(scheduled_change(planned, change))
    return tuple(sorted(found, key=lambda each: each.rank))


def _estimated_seconds(planned: PlanResult, change: Change) -> float:
    """Return an estimate of the step time of a change, in seconds; infinite if its placement is not
    possible.

    It is the time of a step with the order of tasks in the plan's schedule, or a lower bound if
    this order is not possible.
    """
    try:
        placed = _predicted_placement(planned, change.placement)
    except CANDIDATE_ERRORS:
        return math.inf
    if len(placed.placement.stages) == len(planned.plan.placement.stages):
        try:
            return simulate(
                planned.plan.schedule, placed.graph.stage_devices, placed.prediction
            ).end
        except InfeasibleError:
            # The plan's task order cannot run on this placement, but the scheduler may find another
            # order. The estimate is therefore the lower bound of all orders, `lower_bound`.
            pass
    return lower_bound(placed.problem, placed.placement, placed.prediction)


def _predicted_placement(planned: PlanResult, placement: Placement) -> PredictedPlacement:
    """Return `placement` with its costs. Raise InfeasibleError if it is not valid for the plan's
    graph.
    """
    placement.verify(planned.problem.graph)
    return predict_placement(planned.model, planned.problem, placement, Runner())


def split_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """Yield changes of the splits of one node over the devices of its stage, in the first pipeline
    with this node. The kind of a change is the text of its split axes.
    """
    index = placement.stage_of()[node]
    stage = placement.stages[index]
    for splits in _valid_splits(_stage_sample_axes(problem, stage), node, len(stage.devices)):
        if splits != stage.splits_of(node):
            found = {**dict(stage.splits), node: splits}
            edited = replace(
                stage, splits=tuple(sorted((each, own) for each, own in found.items() if own))
            )
            kind = " ".join(split.axis for split in splits)
            yield Change(
                kind,
                ", ".join(map(str, splits)) or "not split",
                _with_stages(placement, {index: edited}),
            )


def _valid_splits(samples: SampleAxes, node: int, group: int) -> Iterator[tuple[Split, ...]]:
    """Yield valid splits of a node over `group` devices: no split, splits of one axis with any
    divisor of `group` as degree, and splits of two axes that together use all devices.
    """
    yield ()
    axes = [
        axis.name
        for axis in samples.uses[node].space.axes
        if axis.kind is not AxisKind.UNSPLITTABLE
    ]
    degrees = [degree for degree in range(2, group + 1) if group % degree == 0]
    ones = [((axis, degree),) for axis in axes for degree in degrees]
    twos = [
        ((outer, degree), (inner, group // degree))
        for outer, inner in itertools.permutations(axes, 2)
        for degree in degrees
        if degree < group
    ]
    for splits in (*ones, *twos):
        try:
            yield checked_splits("this", samples, node, splits)
        except ConfigurationError:
            continue


def move_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """Yield changes that move a node to the stage before or after its stage, in the first pipeline
    with this node.

    Stages run in sequence. So nodes of the same stage that depend on the node move with it to the
    later stage, and nodes on which it depends move with it to the earlier stage. Moved nodes are
    split by samples if their splits do not fit the new stage.
    """
    index = placement.stage_of()[node]
    nodes = placement.stages[index].nodes
    for other in _neighbours(placement, index):
        along = _nodes_moved_together(problem.graph, nodes, node, readers=other > index)
        moved = (
            _with_moved_nodes(problem, placement, along, index, other)
            if len(along) < len(nodes)
            else None
        )
        if moved is not None:
            why = "read from it" if other > index else "it reads from"
            others = f", with {len(along) - 1} that {why}" if len(along) > 1 else ""
            yield Change(f"stage {other}", f"moved to stage {other}{others}", moved)


def _neighbours(placement: Placement, index: int) -> Iterator[int]:
    """Yield the indices of the stages before and after stage `index` in its pipeline, if there are
    such stages.
    """
    pipeline = placement.stages[index].pipeline
    own = [place for place, stage in enumerate(placement.stages) if stage.pipeline == pipeline]
    at = own.index(index)
    yield from own[max(0, at - 1) : at]
    yield from own[at + 1 : at + 2]


def _nodes_moved_together(
    graph: Graph, nodes: tuple[int, ...], node: int, readers: bool
) -> tuple[int, ...]:
    """Return, in ascending order, the node `node` and those of the stage's `nodes` that must move
    with it. If `readers`, these are the nodes that depend on `node`, otherwise the nodes on which
    it depends. Only dependences inside the stage count.
    """
    found = {node}
    for each in nodes if readers else reversed(nodes):
        producers = {graph.producer(name) for name in graph.nodes[each].inputs if name}
        if readers and not found.isdisjoint(producers):
            found.add(each)
        elif not readers and each in found:
            found.update(producer for producer in producers if producer in nodes)
    return tuple(sorted(found))


def _with_moved_nodes(
    problem: Problem, placement: Placement, nodes: tuple[int, ...], source: int, target: int
) -> Placement | None:
    """Return the placement with `nodes` moved from stage `source` to stage `target`.

    The nodes keep their splits if both stages have equally many devices and equal micro-batch
    sizes. Otherwise they are split by samples; None if the samples of one of them cannot be divided
    among the devices of `target`.
    """
    old = placement.stages[source]
    new = placement.stages[target]
    samples = _stage_sample_axes(problem, new)
    group = len(new.devices)
    splits = dict(new.splits)
    for node in nodes:
        if len(old.devices) == group and old.micro_batch_size == new.micro_batch_size:
            own = old.splits_of(node)
        elif samples.can_divide(node, group):
            own = tuple(split for _, each in samples.splits((node,), group) for split in each)
        else:
            return None
        if own:
            splits[node] = own
    gone = set(nodes)
    left = replace(
        old,
        nodes=tuple(node for node in old.nodes if node not in gone),
        splits=tuple(each for each in old.splits if each[0] not in gone),
    )
    joined = replace(
        new, nodes=tuple(sorted((*new.nodes, *nodes))), splits=tuple(sorted(splits.items()))
    )
    return _with_stages(placement, {source: left, target: joined})


def _with_stages(placement: Placement, stages: dict[int, Stage]) -> Placement:
    """Return the placement with some stages replaced. `stages` contains the new stages by index."""
    return Placement(
        tuple(stages.get(index, stage) for index, stage in enumerate(placement.stages))
    )


def _stage_sample_axes(problem: Problem, stage: Stage) -> SampleAxes:
    """Return the sample axes of the nodes of the graph at the micro-batch size of `stage`."""
    graph = problem.graph
    size = stage.micro_batch_size
    return sample_axes(graph if size == problem.micro_batch_size else resize_batch(graph, size))


_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of nodes by which the boundary between two stages is moved."""


def stage_changes(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    """Yield changes of stage `index`: its recomputation, a split by samples only, moves of its
    boundaries and of devices, and merges with its neighbours.
    """
    stage = placement.stages[index]
    if problem.train:
        what = (
            "its forward is not run again"
            if stage.recompute
            else "its forward is run again for its backward"
        )
        edited = replace(stage, recompute=not stage.recompute)
        yield Change("recomputation", what, _with_stages(placement, {index: edited}))
    sampled = _sample_split_stage(problem, stage, stage.devices, stage.nodes)
    if sampled is not None and sampled != stage:
        what = "its devices share samples and split nothing else"
        yield Change("samples", what, _with_stages(placement, {index: sampled}))
    for other in _neighbours(placement, index):
        yield from _boundary_changes(problem, placement, index, other)
        yield from _device_changes(problem, placement, index, other)
        yield from _merge_changes(problem, placement, *sorted((index, other)))


def _boundary_changes(
    problem: Problem, placement: Placement, index: int, other: int
) -> Iterator[Change]:
    """Yield changes that move the boundary between the stages `index` and `other`, in both
    directions and by the numbers of nodes `_COUNTS`.
    """
    for source, target in ((index, other), (other, index)):
        nodes = placement.stages[source].nodes
        for count in _COUNTS:
            if count >= len(nodes):
                break
            moved = nodes[-count:] if target > source else nodes[:count]
            edited = _with_moved_nodes(problem, placement, moved, source, target)
            if edited is not None:
                end = "last" if target > source else "first"
                which = f"{end} {count} {plural(count, 'node')}" if count > 1 else f"{end} node"
                told = (
                    f"its {which} in stage {other}"
                    if source == index
                    else f"the {which} of stage {other} in it"
                )
                yield Change(f"end {other}", told, edited)


def _device_changes(
    problem: Problem, placement: Placement, index: int, other: int
) -> Iterator[Change]:
    """Yield changes that move half of the devices of one of the stages `index` and `other` to the
    other one. Both stages are then split by samples only.
    """
    for giver, taker in ((index, other), (other, index)):
        old = placement.stages[giver]
        new = placement.stages[taker]
        half = len(old.devices) // 2
        if not half or set(old.devices) & set(new.devices):
            continue
        if taker > giver:
            kept = old.devices[:-half]
            devices = (*old.devices[-half:], *new.devices)
        else:
            kept = old.devices[half:]
            devices = (*new.devices, *old.devices[:half])
        left = _sample_split_stage(problem, old, kept, old.nodes)
        joined = _sample_split_stage(problem, new, devices, new.nodes)
        if left is not None and joined is not None:
            whose, whom = (
                ("its", f"stage {other}") if giver == index else (f"stage {other}'s", "it")
            )
            edited = _with_stages(placement, {giver: left, taker: joined})
            yield Change(f"devices {other}", f"{half} of {whose} devices for {whom}", edited)


def _merge_changes(
    problem: Problem, placement: Placement, first: int, second: int
) -> Iterator[Change]:
    """Yield the change that merges stage `first` and the next stage `second` into one stage on the
    devices of both, split by samples only. Yield none if that is not possible.
    """
    old = placement.stages[first]
    new = placement.stages[second]
    devices = tuple(dict.fromkeys((*old.devices, *new.devices)))
    joined = _sample_split_stage(problem, old, devices, tuple(sorted((*old.nodes, *new.nodes))))
    if joined is not None and old.micro_batch_size == new.micro_batch_size:
        stages = _with_stages(placement, {first: joined}).stages
        told = f"stages {first} and {second} as one"
        yield Change(told, told, Placement(stages[:second] + stages[second + 1 :]))


def _sample_split_stage(
    problem: Problem, stage: Stage, devices: tuple[int, ...], nodes: tuple[int, ...]
) -> Stage | None:
    """Return the stage with the given devices and nodes, split by samples only; None if the samples
    of a node cannot be divided among the devices.
    """
    try:
        splits = _stage_sample_axes(problem, stage).splits(nodes, len(devices))
    except InfeasibleError:
        return None
    return replace(stage, nodes=nodes, devices=devices, splits=splits)
