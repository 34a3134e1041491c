"""Why a plan is as it is: reports of devices and nodes, and what other choices and other problems would give.

The price of a change is the step of the edited placement, ordered by the plan's own scheduler.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopipe.ir.batch import rebatched
from autopipe.ir.cluster import Cluster, Level
from autopipe.ir.errors import REFUSALS, ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase
from autopipe.ir.space import AxisKind
from autopipe.ir.timeline import Prediction, Span, Timeline, Transfer
from autopipe.passes.analysis.constraints import checked_splits
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.cost.communication import relayout_seconds
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import StageWork, exchanges_of, stage_work
from autopipe.passes.pipeline import (
    Placed,
    PlanResult,
    Request,
    Runner,
    make_plan,
    predict_placement,
    run_scheduler,
    strategy_and_scheduler,
    time_schedule,
)
from autopipe.passes.schedule.limits import lower_bound
from autopipe.passes.schedule.simulate import simulate

Timed = TypeVar("Timed", Span, Transfer)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device's step, in seconds that add up to all of it."""

    device: int
    stages: tuple[int, ...]
    tasks: tuple[tuple[str, int, float], ...]
    """For each stage and phase, such as `2F`, how many tasks and their seconds together."""
    gradients_s: float
    update_s: float
    waits: tuple[tuple[int, float], ...]
    """Seconds that it waits for other devices to compute, the longest first."""
    messages_s: float
    """Seconds that it waits for messages on their way."""
    end_s: float
    """Seconds that it waits at the end, for gradients of others or for the last device to be done."""
    first_s: float
    """When its first task starts."""
    static_bytes: int
    peak_bytes: int

    @property
    def busy_s(self) -> float:
        """Seconds in which it does something."""
        return sum(seconds for _, _, seconds in self.tasks) + self.gradients_s + self.update_s


def device_report(placement: Placement, prediction: Prediction, timeline: Timeline, device: int) -> DeviceReport:
    """The report on a device in the step of a timeline."""
    spans = [span for span in timeline.spans if span.device == device]
    stages = tuple(index for index, stage in enumerate(placement.stages) if device in stage.devices)
    waits, messages = _waits(placement, timeline, spans)
    gradients = sum(prediction.stages[stage].gradient_s for stage in stages)
    update = sum(prediction.stages[stage].update_s for stage in stages)
    last = max((span.end for span in spans), default=0.0)
    return DeviceReport(
        device=device,
        stages=stages,
        tasks=_tasks(spans),
        gradients_s=gradients,
        update_s=update,
        waits=tuple(sorted(waits.items(), key=lambda each: (-each[1], each[0]))),
        messages_s=messages,
        end_s=timeline.end - last - gradients - update,
        first_s=spans[0].start if spans else 0.0,
        static_bytes=timeline.static_memory[device],
        peak_bytes=timeline.peak_memory[device],
    )


def _tasks(spans: list[Span]) -> tuple[tuple[str, int, float], ...]:
    counts: Counter[tuple[int, Phase]] = Counter()
    seconds: defaultdict[tuple[int, Phase], float] = defaultdict(float)
    for span in spans:
        key = span.task.stage, span.task.phase
        counts[key] += 1
        seconds[key] += span.end - span.start
    return tuple((f"{stage}{phase.value}", count, seconds[stage, phase]) for (stage, phase), count in counts.items())


def _waits(placement: Placement, timeline: Timeline, spans: list[Span]) -> tuple[Mapping[int, float], float]:
    """Seconds by device that is waited for, and seconds of waiting for messages on their way."""
    ends, arrivals = _by_end(timeline.spans), _by_end(timeline.transfers)
    waits: defaultdict[int, float] = defaultdict(float)
    messages = free = 0.0
    for span in spans:
        gap = span.start - free
        group = placement.stages[span.task.stage].devices
        if gap > 0.0:
            brought = [each for each in arrivals.get(span.start, ()) if each.target in group]
            if brought:
                last = max(brought, key=lambda each: each.start)
                flying = min(gap, last.end - last.start)
                messages += flying
                if gap > flying:
                    waits[last.source] += gap - flying
            else:
                before = [each.device for each in ends.get(span.start, ()) if each.device != span.device]
                own = [device for device in before if device in group]
                waits[min(own or before, default=span.device)] += gap
        free = span.end
    return waits, messages


def _by_end(timed: Iterable[Timed]) -> Mapping[float, list[Timed]]:
    """Tasks by end: a task starts at the very float that the one it waited for ends at."""
    found: defaultdict[float, list[Timed]] = defaultdict(list)
    for each in timed:
        found[each.end].append(each)
    return found


_MOST_S = 5.0
"""Seconds that the strategy may have taken for it to be asked again for each wish."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change of what a plan is made for, in words."""

    what: str
    request: Request


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """Result of a what-if."""

    what: str
    planned_again: bool
    """True if the strategy was asked again; else the placement is that of the plan, ordered anew."""
    samples_per_s: float | None = None
    """Of the new step; None where there is none."""
    refused: str | None = None


def what_ifs(planned: PlanResult) -> Iterator[WhatIf]:
    """More memory, faster links, more micro-batches: twice as much of each, one at a time."""
    request, problem = planned.request, planned.problem
    cluster = request.cluster
    if request.memory_limit is None:
        roomy = tuple(replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices)
        yield WhatIf("twice the memory", replace(request, cluster=replace(cluster, devices=roomy)))
    else:
        yield WhatIf("twice the memory", replace(request, memory_limit=2 * request.memory_limit))
    for inside, where in ((True, "inside nodes"), (False, "between nodes")):
        faster = _faster(cluster, inside)
        if faster != cluster:
            yield WhatIf(f"twice the bandwidth {where}", replace(request, cluster=faster))
    count, size = problem.micro_batches, problem.batch_size
    if size % (2 * count) == 0:
        halves = replace(request, batch_size=size, micro_batches=2 * count, micro_batch_size=None)
        yield WhatIf("twice the micro-batches, of half the size", halves)
    longer = replace(request, batch_size=2 * size, micro_batches=2 * count, micro_batch_size=None)
    yield WhatIf("twice the micro-batches, of the same size", longer)


def is_quick(planned: PlanResult) -> bool:
    """True if the strategy took so little time that it can be asked again for each wish."""
    strategy, _ = strategy_and_scheduler(planned.request)
    return dict(planned.plan.summary.search_time_s).get(strategy.name, 0.0) <= _MOST_S


def granted(planned: PlanResult, wish: WhatIf, again: bool) -> WhatIfResult:
    """Result of a change: planned `again` by strategy and scheduler, else the placement as it is, ordered anew."""
    try:
        if again:
            return WhatIfResult(wish.what, True, make_plan(wish.request).plan.summary.samples_per_s)
        return _kept(planned, wish)
    except REFUSALS as error:
        return WhatIfResult(wish.what, again, refused=error.line)


def _kept(planned: PlanResult, wish: WhatIf) -> WhatIfResult:
    """The step of the same placement, ordered anew."""
    problem = _changed(planned.problem, wish.request)
    if problem is None:
        return WhatIfResult(wish.what, False, refused="asks for another placement, and this one was long searched for")
    runner, (_, scheduler) = Runner(), strategy_and_scheduler(planned.request)
    placed = predict_placement(planned.model, problem, planned.plan.placement, runner)
    found = time_schedule(placed, run_scheduler(placed, scheduler, runner), runner)
    return WhatIfResult(wish.what, False, problem.batch_size / found.timeline.end)


def _changed(problem: Problem, request: Request) -> Problem | None:
    """The problem under the request; None where its micro-batches are of another size, or its devices others."""
    count, size = request.micro_batches or problem.micro_batches, request.batch_size or problem.batch_size
    if request.cluster.size != problem.cluster.size or size // count != problem.micro_batch_size:
        return None
    limit = request.memory_limit
    return replace(problem, cluster=request.cluster, memory_limit=limit, micro_batches=count, batch_size=size)


def _faster(cluster: Cluster, inside: bool) -> Cluster:
    """The cluster with twice the bandwidth inside its nodes, or of all other links; what was measured stays."""
    if cluster.groups:
        groups = tuple(replace(group, levels=_faster_levels(group.levels, inside)) for group in cluster.groups)
        joined = cluster.levels if inside else tuple(map(_doubled, cluster.levels))
        return replace(cluster, groups=groups, levels=joined)
    return replace(cluster, levels=_faster_levels(cluster.levels, inside))


def _faster_levels(levels: tuple[Level, ...], inside: bool) -> tuple[Level, ...]:
    return tuple(_doubled(level) if (place == 0) == inside else level for place, level in enumerate(levels))


def _doubled(level: Level) -> Level:
    if level.size == 1:
        return level
    return replace(level, link=replace(level.link, bandwidth_bytes_per_s=2 * level.link.bandwidth_bytes_per_s))


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that a node reads or writes, and how it gets from one to the other."""

    value: str
    reads: bool
    """True if the node reads it; else it writes it."""
    node: str
    """The node at the other end; "" for the model's own inputs and outputs, and parameters."""
    stage: int | None
    """That node's stage."""
    bytes: int
    """Of the whole value, of one of the node's micro-batches."""
    exchanges: tuple[str, ...]
    """Exchanges of the stage's devices for the layouts in which it is read: collectives by kind."""
    exchange_s: float
    """Seconds of these for a micro-batch, forward and backward."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Facts on a node."""

    node: int
    name: str
    op: str
    stage: int
    devices: tuple[int, ...]
    splits: tuple[Split, ...]
    share: float
    """The part of it that each device computes."""
    forward_s: float
    """Seconds of a micro-batch on a device."""
    backward_s: float
    recomputed: bool
    """True if each stage that reads its values computes it for itself, as it costs less than sending."""
    edges: tuple[Edge, ...]


def node_report(problem: Problem, placement: Placement, node: int) -> NodeReport:
    """The report on a node, in the placement's first pipeline."""
    stage_of = placement.stage_of()
    index = stage_of[node]
    stage = placement.stages[index]
    work = stage_work(problem, placement)[index]
    own = work.problem
    assigned = next((each for each in work.nodes if each.index == node), None)
    share = 1.0 if assigned is None else assigned.sharing.share
    kinds = {own.cluster.devices[device] for device in stage.devices}
    seconds = [node_seconds([own.work[node]], device, own.precision, share) for device in kinds]
    forward, backward = (max(float(each[phase][0]) for each in seconds) for phase in (0, 1))
    found = own.graph.nodes[node]
    return NodeReport(
        node=node,
        name=found.name,
        op=found.op,
        stage=index,
        devices=stage.devices,
        splits=stage.splits_of(node),
        share=share,
        forward_s=forward,
        backward_s=backward if problem.train else 0.0,
        recomputed=node in recomputed_nodes(problem.graph),
        edges=tuple(_edges(own.graph, work, stage_of, node)),
    )


def _edges(graph: Graph, work: StageWork, stage_of: dict[int, int], node: int) -> Iterator[Edge]:
    found = graph.nodes[node]
    for value in dict.fromkeys(name for name in found.inputs if name):
        producer = graph.producer(value)
        other = "" if producer is None else graph.nodes[producer].name
        yield _edge(graph, work, value, True, other, None if producer is None else stage_of[producer])
    for value in found.outputs:
        readers = graph.consumers().get(value, ())
        if value and not readers:
            yield _edge(graph, work, value, False, "", None)
        for reader in readers:
            yield _edge(graph, work, value, False, graph.nodes[reader].name, stage_of[reader])


def _edge(graph: Graph, work: StageWork, value: str, reads: bool, other: str, stage: int | None) -> Edge:
    group = work.stage.devices
    steps = [step.step for step in exchanges_of(graph, work) if step.value == value] if len(group) > 1 else []
    width = graph.type_of(value).dtype.itemsize
    directions = 2 if value in differentiable_values(graph) and work.problem.train else 1
    seconds = directions * sum(relayout_seconds(work.problem.cluster, group, step, width) for step in steps)
    kinds = tuple(dict.fromkeys(step.kind for step in steps))
    return Edge(value, reads, other, stage, graph.type_of(value).bytes, kinds, seconds)


_MOST = 6
"""Changes that are scheduled anew, before it is given up to find as many as are wanted."""


@dataclass(frozen=True, slots=True)
class Change:
    """An edited placement, and what was edited, in words."""

    kind: str
    """Of changes of one kind only the best is of interest."""
    what: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class EditPrice:
    """A change and what its step takes, or why there is none."""

    what: str
    placement: Placement
    step_s: float | None = None
    peak_memory_bytes: int | None = None
    """The most on any device."""
    refused: str | None = None

    @property
    def rank(self) -> float:
        """Seconds of the step, infinite where there is none."""
        return math.inf if self.step_s is None else self.step_s


def priced(planned: PlanResult, change: Change) -> EditPrice:
    """Plan the edited placement with the plan's own scheduler."""
    try:
        placed = _placed(planned, change.placement)
        runner, (_, scheduler) = Runner(), strategy_and_scheduler(planned.request)
        found = time_schedule(placed, run_scheduler(placed, scheduler, runner), runner)
    except REFUSALS as error:
        return EditPrice(change.what, change.placement, refused=error.line)
    return EditPrice(change.what, change.placement, found.timeline.end, max(found.timeline.peak_memory))


def cheapest(planned: PlanResult, changes: Iterable[Change], wanted: int) -> tuple[EditPrice, ...]:
    """The best change of each kind, the one that costs least first; then those that looked as cheap and have no plan.

    All are weighed in the order of the plan's schedule, the most promising are scheduled anew.
    """
    weighed = [(_weight(planned, each), each) for each in _once(changes)]
    possible = sorted((each for each in weighed if not math.isinf(each[0])), key=lambda each: each[0])
    best: dict[str, Change] = {}
    for _, change in possible:
        best.setdefault(change.kind, change)
    found: list[EditPrice] = []
    for change in list(best.values())[:_MOST]:
        if sum(each.step_s is not None for each in found) < wanted:
            found.append(priced(planned, change))
    return tuple(sorted(found, key=lambda each: each.rank))


def _once(changes: Iterable[Change]) -> list[Change]:
    """The changes without those that come to a placement seen before."""
    return list({each.placement: each for each in reversed(list(changes))}.values())[::-1]


def _weight(planned: PlanResult, change: Change) -> float:
    """About what a change's step takes: infinite where it cannot be placed."""
    try:
        placed = _placed(planned, change.placement)
    except REFUSALS:
        return math.inf
    if len(placed.placement.stages) == len(planned.plan.placement.stages):
        try:
            return simulate(planned.plan.schedule, placed.graph.stage_devices, placed.prediction).end
        except InfeasibleError:
            pass  # The order cannot run any more: its scheduler finds another one.
    return lower_bound(placed.problem, placed.placement, placed.prediction)


def _placed(planned: PlanResult, placement: Placement) -> Placed:
    placement.verify(planned.problem.graph)
    return predict_placement(planned.model, planned.problem, placement, Runner())


def split_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """The other splits of a node, alone, over the devices of its stage in the first pipeline: a kind for any axes."""
    index = placement.stage_of()[node]
    stage = placement.stages[index]
    for splits in _legal(samples_of(problem, stage), node, len(stage.devices)):
        if splits != stage.splits_of(node):
            edited = replace(stage, splits=_with(stage, node, splits))
            kind = " ".join(split.axis for split in splits)
            yield Change(kind, ", ".join(map(str, splits)) or "not split", with_stages(placement, {index: edited}))


def move_changes(problem: Problem, placement: Placement, node: int) -> Iterator[Change]:
    """The node in the stage before or after its own in the first pipeline, samples shared there where they can be.

    With it go the nodes of its stage that it reads from, or that read from it: stages are run one after the other.
    """
    index = placement.stage_of()[node]
    nodes = placement.stages[index].nodes
    for other in neighbours(placement, index):
        along = _along(problem.graph, nodes, node, later=other > index)
        moved = moved_nodes(problem, placement, along, index, other) if len(along) < len(nodes) else None
        if moved is not None:
            why = "read from it" if other > index else "it reads from"
            others = f", with {len(along) - 1} that {why}" if len(along) > 1 else ""
            yield Change(f"stage {other}", f"moved to stage {other}{others}", moved)


def neighbours(placement: Placement, index: int) -> Iterator[int]:
    """The stages before and after a stage in its pipeline."""
    pipeline = placement.stages[index].pipeline
    own = [place for place, stage in enumerate(placement.stages) if stage.pipeline == pipeline]
    at = own.index(index)
    yield from own[max(0, at - 1) : at]
    yield from own[at + 1 : at + 2]


def _along(graph: Graph, nodes: tuple[int, ...], node: int, later: bool) -> tuple[int, ...]:
    """The node with all of a stage's, ascending, that read from it, directly or not; else with all it reads from."""
    found = {node}
    if later:
        for each in nodes:
            producers = {graph.producer(name) for name in graph.nodes[each].inputs if name}
            if not found.isdisjoint(producers):
                found.add(each)
        return tuple(sorted(found))
    for each in reversed(nodes):
        if each in found:
            producers = {graph.producer(name) for name in graph.nodes[each].inputs if name}
            found.update(producer for producer in producers if producer in nodes)
    return tuple(sorted(found))


def moved_nodes(
    problem: Problem, placement: Placement, nodes: tuple[int, ...], source: int, target: int
) -> Placement | None:
    """The placement with nodes of one stage in another, split as before on as many devices, else by samples.

    None where samples cannot be shared there.
    """
    old, new = placement.stages[source], placement.stages[target]
    samples, group = samples_of(problem, new), len(new.devices)
    splits = dict(new.splits)
    for node in nodes:
        if len(old.devices) == group and old.micro_batch_size == new.micro_batch_size:
            own = old.splits_of(node)
        elif samples.divides(node, group):
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
    joined = replace(new, nodes=tuple(sorted((*new.nodes, *nodes))), splits=tuple(sorted(splits.items())))
    return with_stages(placement, {source: left, target: joined})


def with_stages(placement: Placement, stages: dict[int, Stage]) -> Placement:
    """The placement with other stages in place of some."""
    return Placement(tuple(stages.get(index, stage) for index, stage in enumerate(placement.stages)))


def _with(stage: Stage, node: int, splits: tuple[Split, ...]) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    found = {**dict(stage.splits), node: splits}
    return tuple(sorted((each, own) for each, own in found.items() if own))


def samples_of(problem: Problem, stage: Stage) -> SampleAxes:
    """The sample axes of the graph on the stage's own micro-batches."""
    graph, size = problem.graph, stage.micro_batch_size
    return sample_axes(graph if size == problem.micro_batch_size else rebatched(graph, size))


def _legal(samples: SampleAxes, node: int, group: int) -> Iterator[tuple[Split, ...]]:
    """Splits of a node over `group` devices: along one axis in any degree, or two that take all of them."""
    yield ()
    axes = [axis.name for axis in samples.uses[node].space.axes if axis.kind is not AxisKind.WHOLE]
    degrees = [degree for degree in range(2, group + 1) if group % degree == 0]
    ones = [((axis, degree),) for axis in axes for degree in degrees]
    twos = [
        ((outer, degree), (inner, group // degree))
        for outer, inner in itertools.permutations(axes, 2)
        for degree in degrees
        if degree < group
    ]
    for asked in (*ones, *twos):
        try:
            yield checked_splits("this", samples, node, asked)
        except ConfigurationError:
            continue


_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""By how many nodes a stage's end is moved."""


def stage_changes(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    """The changes of one stage, and of the ends that it shares with its neighbours."""
    if problem.train:
        yield from _recomputation(placement, index)
    yield from _shared_samples(problem, placement, index)
    for other in neighbours(placement, index):
        yield from _moved_end(problem, placement, index, other)
        yield from _other_devices(problem, placement, index, other)
        yield from _merged(problem, placement, *sorted((index, other)))


def _recomputation(placement: Placement, index: int) -> Iterator[Change]:
    stage = placement.stages[index]
    what = "its forward is not run again" if stage.recompute else "its forward is run again for its backward"
    yield Change("recomputation", what, with_stages(placement, {index: replace(stage, recompute=not stage.recompute)}))


def _shared_samples(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    stage = placement.stages[index]
    edited = _by_samples(problem, stage, stage.devices, stage.nodes)
    if edited is not None and edited != stage:
        yield Change(
            "samples", "its devices share samples and split nothing else", with_stages(placement, {index: edited})
        )


def _moved_end(problem: Problem, placement: Placement, index: int, other: int) -> Iterator[Change]:
    """The end between two stages some nodes further on, either way."""
    for source, target in ((index, other), (other, index)):
        nodes = placement.stages[source].nodes
        for count in _COUNTS:
            if count < len(nodes):
                moved = nodes[-count:] if target > source else nodes[:count]
                edited = moved_nodes(problem, placement, moved, source, target)
                if edited is not None:
                    which = f"{'last' if target > source else 'first'} {f'{count} nodes' if count > 1 else 'node'}"
                    if source == index:
                        yield Change(f"end {other}", f"its {which} in stage {other}", edited)
                    else:
                        yield Change(f"end {other}", f"the {which} of stage {other} in it", edited)


def _other_devices(problem: Problem, placement: Placement, index: int, other: int) -> Iterator[Change]:
    """Half of one stage's devices for its neighbour, both sharing out samples."""
    for giver, taker in ((index, other), (other, index)):
        old, new = placement.stages[giver], placement.stages[taker]
        half = len(old.devices) // 2
        if not half or set(old.devices) & set(new.devices):
            continue
        kept, given = (
            (old.devices[:-half], old.devices[-half:]) if taker > giver else (old.devices[half:], old.devices[:half])
        )
        devices = (*given, *new.devices) if taker > giver else (*new.devices, *given)
        edited = {
            giver: _by_samples(problem, old, kept, old.nodes),
            taker: _by_samples(problem, new, devices, new.nodes),
        }
        if all(each is not None for each in edited.values()):
            whose = "its" if giver == index else f"stage {other}'s"
            whom = f"for stage {other}" if giver == index else "for it"
            stages = {place: each for place, each in edited.items() if each is not None}
            told = f"{half} of {whose} devices {whom}"
            yield Change(f"devices {other}", told, with_stages(placement, stages))


def _merged(problem: Problem, placement: Placement, first: int, second: int) -> Iterator[Change]:
    """A stage and the next as one, on the devices of both."""
    old, new = placement.stages[first], placement.stages[second]
    devices = tuple(dict.fromkeys((*old.devices, *new.devices)))
    joined = _by_samples(problem, old, devices, tuple(sorted((*old.nodes, *new.nodes))))
    if joined is not None and old.micro_batch_size == new.micro_batch_size:
        stages = [stage for index, stage in enumerate(placement.stages) if index != second]
        stages[first] = joined
        told = f"stages {first} and {second} as one"
        yield Change(told, told, Placement(tuple(stages)))


def _by_samples(problem: Problem, stage: Stage, devices: tuple[int, ...], nodes: tuple[int, ...]) -> Stage | None:
    """The stage with other devices and nodes, sharing samples; None where these cannot be shared so."""
    try:
        splits = samples_of(problem, stage).splits(nodes, len(devices))
    except InfeasibleError:
        return None
    return replace(stage, nodes=nodes, devices=devices, splits=splits)
