"""A step of a schedule, event by event: compute, messages, gradient all-reduce, update; and memory
over time.

Of devices that do the same one is simulated, and of links that carry the same one: the devices of a
stage's group with equal orders start and end each task together, whatever a message takes; so do
messages on links between such devices whose messages take equally long. What is left out says
nothing new: times are those of the whole step, to the last bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Lanes, Phase, Schedule, Task, lane_groups, lanes_of, on_each_device
from autopipe.ir.timeline import (
    EndKind,
    EndSpan,
    Links,
    Message,
    Prediction,
    Span,
    StagePrediction,
    Timeline,
    Transfer,
)

StageDevices = Sequence[Sequence[int]]
"""The device group of each stage."""

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
_WHOLE = _PHASES.index(Phase.BACKWARD)
_HALF = _PHASES.index(Phase.INPUT_GRADIENT) - _WHOLE
"""From the number of a backward's kind to that of its first half, which receives in its place."""


class _MessageEdge(NamedTuple):
    """One message after a task, in the direction in which it goes. The micro-batch that receives is
    micro-batch // `sent_every` * `received_every` + `received_index`.
    """

    kind: int
    """Kind of the task that receives."""
    sent_every: int
    received_every: int
    received_index: int
    source: int
    target: int
    bytes: int
    seconds: float


def _message_edges(
    messages: Sequence[Message], stages: int
) -> tuple[list[list[list[_MessageEdge]]], list[list[int]]]:
    """The messages that a task sends, there and back, and the number that it waits for. Both by
    kind of task (a stage's number times the number of phases, plus its phase), then by micro-batch:
    number m does as m mod the length of the kind's list says. Gradients go to whole backwards here,
    and come from whole ones and from first halves.
    """
    periods = [1] * stages
    for each in messages:
        for stage, turn in (
            (each.source_stage, each.source_slice),
            (each.target_stage, each.target_slice),
        ):
            periods[stage] = math.lcm(periods[stage], turn.of)
    sends: list[list[list[_MessageEdge]]] = [
        [[] for _ in range(period)] for period in periods for _ in _PHASES
    ]
    awaited = [[0] * period for period in periods for _ in _PHASES]
    for each in messages:
        there = (each.source, each.target, each.forward_bytes, each.forward_s)
        back = (each.target, each.source, each.backward_bytes, each.backward_s)
        source = each.source_stage * len(_PHASES)
        target = each.target_stage * len(_PHASES)
        own = each.source_slice
        other = each.target_slice
        ways = [(source, target, own, other, there, target)]
        for half in (0, _HALF):
            gradient = source + _WHOLE
            ways.append((target + _WHOLE + half, gradient, other, own, back, gradient + half))
        for sender, receiver, sending, receiving, sent, waiting in ways:
            edge = _MessageEdge(receiver, sending.of, receiving.of, receiving.index, *sent)
            for place in range(sending.index, len(sends[sender]), sending.of):
                sends[sender][place].append(edge)
            for place in range(receiving.index, len(awaited[waiting]), receiving.of):
                awaited[waiting][place] += 1
    return sends, awaited


@dataclass(frozen=True, slots=True)
class DeviceSymmetry:
    """One simulation for all equal devices: `schedule` has an order a lane, `groups` the lanes of
    each stage, and `prediction` the messages of the first of each of `links`, between devices.
    """

    schedule: Schedule
    groups: tuple[tuple[int, ...], ...]
    prediction: Prediction
    lanes: Lanes
    links: Links


def device_symmetry(
    schedule: Schedule, stage_devices: StageDevices, prediction: Prediction
) -> DeviceSymmetry:
    """The lanes and links of a step: pairs of devices by what they exchange. Both directions count:
    a link carries activations one way, of some stages, and gradients of others.
    """
    lanes = lanes_of(stage_devices, schedule.tasks)
    between: dict[tuple[int, int], list[Message]] = {}
    for each in prediction.messages:
        between.setdefault(
            (min(each.source, each.target), max(each.source, each.target)), []
        ).append(each)
    lane = {device: index for index, devices in enumerate(lanes) for device in devices}
    links: dict[Hashable, list[tuple[int, int]]] = {}
    for (low, high), carried in between.items():
        # The first message's sender comes first, so that pairs of either order are compared.
        ends = (low, high) if carried[0].source == low else (high, low)
        content = tuple(
            (replace(each, source=0, target=0), each.source == ends[0]) for each in carried
        )
        # A device without tasks is like no other.
        links.setdefault((*(lane.get(end, ~end) for end in ends), content), []).append(ends)
    firsts = {pairs[0] for pairs in links.values()}
    messages = tuple(
        each
        for each in prediction.messages
        if firsts & {(each.source, each.target), (each.target, each.source)}
    )
    return DeviceSymmetry(
        Schedule(schedule.micro_batches, tuple(schedule.tasks[devices[0]] for devices in lanes)),
        lane_groups(stage_devices, lanes),
        replace(prediction, messages=messages),
        lanes,
        tuple(map(tuple, links.values())),
    )


Curve = tuple[tuple[float, int], ...]


def static_memory(
    devices: int, stage_devices: StageDevices, costs: Sequence[StagePrediction]
) -> tuple[int, ...]:
    """Bytes in use all through a step, a device each: parameters, gradients, optimizer state,
    message buffers.
    """
    static = [0] * devices
    for stage, cost in enumerate(costs):
        for device in stage_devices[stage]:
            static[device] += cost.static_bytes
    return tuple(static)


def _memory_curves(
    static: Sequence[int], costs: Sequence[StagePrediction], spans: Sequence[Span], train: bool
) -> tuple[Curve, ...]:
    """(time, bytes in use from then on), a device each. What a forward keeps is held from its start
    to the end of its backward; where that is split, to the end of its first half, and what the
    second half needs from there to the end of that one. What comes and goes within a task is held
    while a backward (of a split one the first half) runs or, without training, a forward. What is
    freed at an instant is free for what is taken at that instant.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in static]
    for span in spans:
        cost = costs[span.task.stage]
        kept = cost.kept_bytes
        waiting = cost.weight_kept_bytes
        transient = cost.transient_bytes
        match span.task.phase:
            case Phase.FORWARD:
                start, end = (kept, 0) if train else (transient, -transient)
            case Phase.BACKWARD:
                start = transient
                end = -transient - kept
            case Phase.INPUT_GRADIENT:
                start = transient
                end = waiting - transient - kept
            case Phase.WEIGHT_GRADIENT:
                start = 0
                end = -waiting
        changes[span.device] += [(span.start, start), (span.end, end)]
    curves = []
    for used, changed in zip(static, changes, strict=True):
        curve = [(0.0, used)]
        for time, change in sorted(changed):
            used += change
            if curve[-1][0] == time:
                curve[-1] = (time, used)
            elif curve[-1][1] != used:
                curve.append((time, used))
        curves.append(tuple(curve))
    return tuple(curves)


_ARRIVES, _ENDS = range(2)
"""Events: a message for a task arrives, a task ends."""


def simulate(schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> Timeline:
    """The timeline of one step.

    A task starts when it is next on every device of its stage and all that is sent to it has
    arrived. Messages leave as soon as their task is done and overlap with computation; those of one
    directed link follow one another. Of a split backward the first half receives and sends; the
    second waits for the first alone. When a device has run its last task, gradients are summed
    stage by stage (a stage's devices together) and parameters updated, as the generated programs
    do.
    """
    costs = prediction.stages
    one = device_symmetry(schedule, stage_devices, prediction)
    run = _Run(one.schedule, one.groups, one.prediction, [devices[0] for devices in one.lanes])
    run.until_done()
    spans = tuple(sorted(run.spans, key=lambda span: (span.device, span.start, span.end)))
    train = any(task.phase is not Phase.FORWARD for order in one.schedule.tasks for task in order)
    static = static_memory(schedule.devices, stage_devices, costs)
    curves = _memory_curves(static, costs, spans, train)
    memory = on_each_device(one.lanes, [curves[devices[0]] for devices in one.lanes])
    ends = tuple(sorted(run.ends, key=lambda span: (span.device, span.start, span.end)))
    return Timeline(
        spans, tuple(run.transfers), memory, static, run.end, one.lanes, one.links, ends
    )


class _Run:
    """The state of the simulation between two events. A task is a number, its kind times `count`
    plus its micro-batch: steps have many tasks. No stage has more than `count` micro-batches. The
    kinds are stage and phase; then the sums of the stages' gradients, last stage first; then the
    devices' updates.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage_devices: StageDevices,
        prediction: Prediction,
        names: Sequence[int],
    ) -> None:
        self.schedule = schedule
        self.names = names  # Name of each device, which may stand for several.
        stages = prediction.stages
        last = max((task.micro_batch for order in schedule.tasks for task in order), default=0)
        self.count = max(schedule.micro_batches, last + 1)
        kinds = [(stage, phase) for stage in range(len(stages)) for phase in _PHASES]
        self.phases = len(kinds)  # Kinds that are phases of stages.
        self.devices = [stage_devices[stage] for stage, _ in kinds]
        self.seconds = [stages[stage].seconds(phase) for stage, phase in kinds]
        self.sends, self.awaited = _message_edges(prediction.messages, len(stages))
        number = {kind: index * self.count for index, kind in enumerate(kinds)}
        self.orders = [
            [number[task.stage, task.phase] + task.micro_batch for task in order]
            for order in schedule.tasks
        ]
        half = _PHASES.index(Phase.INPUT_GRADIENT)
        self.split = {
            task
            for order in self.orders
            for task in order
            if task // self.count % len(_PHASES) == half
        }
        # The ends of the step: sums of gradients and updates; one that takes no time waits for
        # nobody.
        self.end_kinds: list[tuple[EndKind, int | None]] = []  # Of the kinds behind the phases.
        updates = [0.0] * schedule.devices
        for stage, cost in reversed(list(enumerate(stages))):
            self._add_end(EndKind.GRADIENT_SUM, stage, stage_devices[stage], cost.gradient_s)
            for device in stage_devices[stage]:
                updates[device] += cost.update_s
        for device, seconds in enumerate(updates):
            self._add_end(EndKind.UPDATE, None, (device,), seconds)
        self.position = [0] * schedule.devices
        self.ready: dict[
            int, int
        ] = {}  # For each task that is next on some of its devices, how many of them are idle.
        self.arrived: dict[int, int] = {}
        self.began: dict[int, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, int]] = []
        """(time, number of events made before, task, event): those of one instant in the order of
        their making.
        """
        self.made = 0
        self.spans: list[Span] = []
        self.ends: list[EndSpan] = []
        self.transfers: list[Transfer] = []
        self.end = 0.0

    def _add_end(
        self, kind: EndKind, stage: int | None, devices: Sequence[int], seconds: float
    ) -> None:
        """Add one task that is the last on its devices so far and exchanges no messages, unless it
        takes no time.
        """
        if seconds:
            self.end_kinds.append((kind, stage))
            for device in devices:
                self.orders[device].append(len(self.seconds) * self.count)
            self.devices.append(devices)
            self.seconds.append(seconds)
            self.sends.append([[]])
            self.awaited.append([0])

    def until_done(self) -> None:
        for device in range(self.schedule.devices):
            self._go_on(device, 0.0)
        while self.events:
            now, _, number, event = heapq.heappop(self.events)
            if event == _ENDS:
                self._finish(number, now)
            else:
                self.arrived[number] = self.arrived.get(number, 0) + 1
                self._start_if_it_can(number, now)
        for device, order in enumerate(self.schedule.tasks):
            if self.position[device] < len(order):
                raise InfeasibleError(
                    f"{order[self.position[device]]} never starts",
                    where=f"device {self.names[device]}",
                )

    def _go_on(self, device: int, now: float) -> None:
        """The device is idle: its next task may be what all other devices of a group wait for."""
        position = self.position[device]
        if position < len(self.orders[device]):
            task = self.orders[device][position]
            self.ready[task] = self.ready.get(task, 0) + 1
            self._start_if_it_can(task, now)

    def _start_if_it_can(self, task: int, now: float) -> None:
        kind = task // self.count
        group = self.devices[kind]
        if self.ready.get(task, 0) < len(group):
            return
        awaited = self.awaited[kind]
        if self.arrived.get(task, 0) < awaited[task % self.count % len(awaited)]:
            return
        del self.ready[task]
        self.began[task] = now
        for member in group:
            self.position[member] += 1
        self._add_event(now + self.seconds[kind], task, _ENDS)

    def _finish(self, task: int, now: float) -> None:
        kind, micro_batch = divmod(task, self.count)
        group = self.devices[kind]
        start = self.began.pop(task)
        if kind < self.phases:
            named = self.schedule.tasks[group[0]][self.position[group[0]] - 1]
            self.spans += [Span(self.names[member], named, start, now) for member in group]
            sends = self.sends[kind]
            for edge in sends[micro_batch % len(sends)]:
                self._send(edge, named, now)
        else:
            self.ends += [
                EndSpan(self.names[member], *self.end_kinds[kind - self.phases], start, now)
                for member in group
            ]
        self.end = max(self.end, now)
        for device in group:
            self._go_on(device, now)

    def _send(self, edge: _MessageEdge, task: Task, now: float) -> None:
        micro_batch = (
            task.micro_batch // edge.sent_every * edge.received_every + edge.received_index
        )
        receiver = edge.kind * self.count + micro_batch
        if receiver + _HALF * self.count in self.split and edge.kind % len(_PHASES) == _WHOLE:
            receiver += _HALF * self.count
        if edge.source != edge.target and edge.bytes:
            link = edge.source, edge.target
            start = max(now, self.link_free.get(link, 0.0))
            now = self.link_free[link] = start + edge.seconds
            self.transfers.append(Transfer(*link, task, edge.bytes, start, now))
        self._add_event(now, receiver, _ARRIVES)

    def _add_event(self, time: float, number: int, event: int) -> None:
        self.made += 1
        heapq.heappush(self.events, (time, self.made, number, event))
