"""A step of a schedule, event by event: compute, messages, gradient all-reduce, update.

Messages after each task of a step, and the number that each task waits for.

A step with one device for all that do the same, and one link for all that carry the same.

The devices of a stage's group with equal orders start and end each task together, whatever a message takes; so do
messages on links between such devices whose messages take equally long. What is left out says nothing new: times are
those of the whole step, to the last bit.

Memory over time on every device, from the spans of a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Lanes, MicroBatchSlice, Phase, Schedule, Task, lane_groups, lanes_of, on_each_device
from autopipe.ir.timeline import Links, Message, Prediction, Span, StagePrediction, Timeline, Transfer

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
WHOLE = PHASES.index(Phase.BACKWARD)
HALF = PHASES.index(Phase.INPUT_GRADIENT) - WHOLE
"""From the number of a backward's kind to that of its first half, which receives in its place."""


def kind_of(stage: int, phase: Phase) -> int:
    """The number of a stage's phase."""
    return stage * len(PHASES) + PHASES.index(phase)


class MessageEdge(NamedTuple):
    """One message after a task, in the direction in which it goes."""

    kind: int
    """Kind of the task that receives."""
    own_turns: int
    turns: int
    turn: int
    """The micro-batch that receives is micro-batch // own_turns * turns + turn."""
    source: int
    target: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MessageEdges:
    """By kind of task, then by micro-batch: number m does as m mod the length of the kind's list says."""

    sends: list[list[list[MessageEdge]]]
    awaited: list[list[int]]
    """Number of messages that a task waits for."""


def message_edges(messages: Sequence[Message], stages: int) -> MessageEdges:
    """The messages of a step, there and back.

    Gradients go to whole backwards here, and come from whole ones and first halves alike.
    """
    periods = [1] * (stages * len(PHASES))
    for each in messages:
        for stage, turn in ((each.source_stage, each.source_turn), (each.target_stage, each.target_turn)):
            for phase in PHASES:
                kind = kind_of(stage, phase)
                periods[kind] = math.lcm(periods[kind], turn.of)
    wires = MessageEdges([[[] for _ in range(period)] for period in periods], [[0] * period for period in periods])
    for each in messages:
        source, target = (
            [kind_of(stage, phase) for phase in PHASES[:2]] for stage in (each.source_stage, each.target_stage)
        )
        there = (each.source, each.target, each.forward_bytes, each.forward_s)
        back = (each.target, each.source, each.backward_bytes, each.backward_s)
        _send(wires, source[0], target[0], each.source_turn, each.target_turn, there)
        _await(wires, target[0], each.target_turn)
        for half in (0, HALF):
            _send(wires, target[1] + half, source[1], each.target_turn, each.source_turn, back)
            _await(wires, source[1] + half, each.source_turn)
    return wires


def _send(
    wires: MessageEdges,
    kind: int,
    receiver: int,
    own: MicroBatchSlice,
    other: MicroBatchSlice,
    sent: tuple[int, int, int, float],
) -> None:
    for place in range(own.index, len(wires.sends[kind]), own.of):
        wires.sends[kind][place].append(MessageEdge(receiver, own.of, other.of, other.index, *sent))


def _await(wires: MessageEdges, kind: int, turn: MicroBatchSlice) -> None:
    for place in range(turn.index, len(wires.awaited[kind]), turn.of):
        wires.awaited[kind][place] += 1


@dataclass(frozen=True, slots=True)
class DeviceSymmetry:
    """One simulation for all equal devices: `schedule` has an order a lane, `groups` the lanes of each stage, and
    `prediction` the messages of the first of each of `links`, between devices.
    """

    schedule: Schedule
    groups: tuple[tuple[int, ...], ...]
    prediction: Prediction
    lanes: Lanes
    links: Links


def device_symmetry(
    schedule: Schedule, stage_devices: Sequence[Sequence[int]], prediction: Prediction
) -> DeviceSymmetry:
    """The lanes and links of a step."""
    lanes = lanes_of(stage_devices, schedule.tasks)
    links, messages = _links(lanes, prediction.messages)
    return DeviceSymmetry(
        Schedule(schedule.micro_batches, tuple(schedule.tasks[devices[0]] for devices in lanes)),
        lane_groups(stage_devices, lanes),
        replace(prediction, messages=messages),
        lanes,
        links,
    )


def _links(lanes: Lanes, messages: Sequence[Message]) -> tuple[Links, tuple[Message, ...]]:
    """The pairs of devices by what they exchange, and the messages of the first pair of each kind.

    Both directions count: a link carries activations one way, of some stages, and gradients of others.
    """
    between: dict[tuple[int, int], list[Message]] = {}
    for each in messages:
        between.setdefault((min(each.source, each.target), max(each.source, each.target)), []).append(each)
    lane = {device: index for index, devices in enumerate(lanes) for device in devices}
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for (low, high), carried in between.items():
        # The first message's sender comes first, so that pairs of either order are compared.
        ends = (low, high) if carried[0].source == low else (high, low)
        # A device without tasks is like no other.
        key = *(lane.get(end, ~end) for end in ends), tuple(_content(each, ends[0]) for each in carried)
        found.setdefault(key, []).append(ends)
    firsts = {pairs[0] for pairs in found.values()}
    kept = tuple(each for each in messages if firsts & {(each.source, each.target), (each.target, each.source)})
    return tuple(map(tuple, found.values())), kept


def _content(message: Message, first: int) -> Hashable:
    """A message but for its devices."""
    return replace(message, source=0, target=0), message.source == first


Curve = tuple[tuple[float, int], ...]


def static_memory(
    devices: int, stage_devices: Sequence[Sequence[int]], costs: Sequence[StagePrediction]
) -> tuple[int, ...]:
    """Bytes in use all through a step, a device each: parameters, gradients, optimizer state, message buffers."""
    static = [0] * devices
    for stage, cost in enumerate(costs):
        for device in stage_devices[stage]:
            static[device] += cost.static_bytes
    return tuple(static)


def memory_curves(
    static: Sequence[int], costs: Sequence[StagePrediction], spans: Sequence[Span], train: bool
) -> tuple[Curve, ...]:
    """(time, bytes in use from then on), a device each.

    What a forward keeps is held from its start to the end of its backward; where that is split, to the end of its first
    half, and what the second half needs from there to the end of that one. What comes and goes within a task is held
    while a backward (of a split one the first half) runs or, without training, a forward.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in static]
    for span in spans:
        cost = costs[span.task.stage]
        start, end = _changes(cost, span.task.phase, train)
        changes[span.device] += [(span.start, start), (span.end, end)]
    return tuple(_accumulate(base, each) for base, each in zip(static, changes, strict=True))


def _changes(cost: StagePrediction, phase: Phase, train: bool) -> tuple[int, int]:
    """Bytes that a task allocates as it starts and frees as it ends."""
    match phase:
        case Phase.FORWARD:
            return (cost.kept_bytes, 0) if train else (cost.transient_bytes, -cost.transient_bytes)
        case Phase.BACKWARD:
            return cost.transient_bytes, -cost.transient_bytes - cost.kept_bytes
        case Phase.INPUT_GRADIENT:
            return cost.transient_bytes, cost.weight_kept_bytes - cost.transient_bytes - cost.kept_bytes
        case Phase.WEIGHT_GRADIENT:
            return 0, -cost.weight_kept_bytes


def _accumulate(base: int, changes: list[tuple[float, int]]) -> Curve:
    """The sum of changes over time; what is freed at an instant is free for what is taken at that instant."""
    curve = [(0.0, base)]
    used = base
    for time, change in sorted(changes):
        used += change
        if curve[-1][0] == time:
            curve[-1] = (time, used)
        elif curve[-1][1] != used:
            curve.append((time, used))
    return tuple(curve)


StageDevices = Sequence[Sequence[int]]
"""The device group of each stage."""

_ARRIVES, _ENDS = range(2)
"""Events: a message for a task arrives, a task ends."""


def simulate(schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> Timeline:
    """The timeline of one step.

    A task starts when it is next on every device of its stage and all that is sent to it has arrived. Messages leave as
    soon as their task is done and overlap with computation; those of one directed link follow one another. Of a split
    backward the first half receives and sends; the second waits for the first alone. When a
    device has run its last task, gradients are summed stage by stage (a stage's devices together) and parameters
    updated, as the generated programs do.
    """
    costs = prediction.stages
    one = device_symmetry(schedule, stage_devices, prediction)
    run = _Run(one.schedule, one.groups, one.prediction, [devices[0] for devices in one.lanes])
    run.until_done()
    spans = tuple(sorted(run.spans, key=lambda span: (span.device, span.start, span.end)))
    train = any(task.phase is not Phase.FORWARD for order in one.schedule.tasks for task in order)
    static = static_memory(schedule.devices, stage_devices, costs)
    curves = memory_curves(static, costs, spans, train)
    memory = on_each_device(one.lanes, [curves[devices[0]] for devices in one.lanes])
    return Timeline(spans, tuple(run.transfers), memory, static, run.end, one.lanes, one.links)


class _Run:
    """The state of the simulation between two events.

    A task is a number, its kind times `count` plus its micro-batch: steps have many tasks. No stage has more than
    `count` micro-batches. The kinds are stage and phase; then the sums of the stages' gradients, last stage first; then
    the devices' updates.
    """

    def __init__(
        self, schedule: Schedule, stage_devices: StageDevices, prediction: Prediction, names: Sequence[int]
    ) -> None:
        self.schedule = schedule
        self.names = names
        """Name of each device, which may stand for several."""
        stages = prediction.stages
        last = max((task.micro_batch for order in schedule.tasks for task in order), default=0)
        self.count = max(schedule.micro_batches, last + 1)
        kinds = [(stage, phase) for stage in range(len(stages)) for phase in PHASES]
        self.phases = len(kinds)
        """Kinds that are phases of stages."""
        self.devices = [stage_devices[stage] for stage, _ in kinds]
        self.seconds = [stages[stage].seconds(phase) for stage, phase in kinds]
        wires = message_edges(prediction.messages, len(stages))
        self.sends, self.awaited = [*wires.sends], [*wires.awaited]
        self.orders = [[self._number(task) for task in order] for order in schedule.tasks]
        half = PHASES.index(Phase.INPUT_GRADIENT)
        self.split = {task for order in self.orders for task in order if task // self.count % len(PHASES) == half}
        self._add_end(stage_devices, prediction)
        self.position = [0] * schedule.devices
        self.ready: dict[int, int] = {}
        """For each task that is next on some of its devices, how many of them are idle."""
        self.arrived: dict[int, int] = {}
        self.began: dict[int, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, int]] = []
        """(time, number of events made before, task, event)."""
        self.made = 0
        """Number of events so far: those of one instant are handled in the order in which they were made."""
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.end = 0.0

    def _add_end(self, stage_devices: StageDevices, prediction: Prediction) -> None:
        """Add the ends of the step: sums of gradients and updates; a sum that takes no time waits for nobody."""
        updates = [0.0] * self.schedule.devices
        for stage, cost in reversed(list(enumerate(prediction.stages))):
            if cost.gradient_s:
                self._add_kind(stage_devices[stage], cost.gradient_s)
            for device in stage_devices[stage]:
                updates[device] += cost.update_s
        for device, seconds in enumerate(updates):
            if seconds:
                self._add_kind((device,), seconds)

    def _add_kind(self, devices: Sequence[int], seconds: float) -> None:
        """A kind of which there is one task, the next on its devices; it exchanges no messages."""
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
                    f"{order[self.position[device]]} never starts", where=f"device {self.names[device]}"
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
        self._schedule(now + self.seconds[kind], task, _ENDS)

    def _finish(self, task: int, now: float) -> None:
        kind = task // self.count
        group, start = self.devices[kind], self.began.pop(task)
        if kind < self.phases:
            named = self.schedule.tasks[group[0]][self.position[group[0]] - 1]
            self.spans += [Span(self.names[member], named, start, now) for member in group]
            self._send(task, now)
        self.end = max(self.end, now)
        for device in group:
            self._go_on(device, now)

    def _send(self, task: int, now: float) -> None:
        kind, micro_batch = divmod(task, self.count)
        sends = self.sends[kind]
        for wire in sends[micro_batch % len(sends)]:
            source, target = wire.source, wire.target
            receiver = wire.kind * self.count + micro_batch // wire.own_turns * wire.turns + wire.turn
            if receiver + HALF * self.count in self.split and wire.kind % len(PHASES) == WHOLE:
                receiver += HALF * self.count
            if source == target or wire.bytes == 0:
                self._schedule(now, receiver, _ARRIVES)
                continue
            start = max(now, self.link_free.get((source, target), 0.0))
            end = start + wire.seconds
            self.link_free[source, target] = end
            named = Task(kind // len(PHASES), PHASES[kind % len(PHASES)], micro_batch)
            self.transfers.append(Transfer(source, target, named, wire.bytes, start, end))
            self._schedule(end, receiver, _ARRIVES)

    def _number(self, task: Task) -> int:
        return kind_of(task.stage, task.phase) * self.count + task.micro_batch

    def _schedule(self, time: float, number: int, event: int) -> None:
        self.made += 1
        heapq.heappush(self.events, (time, self.made, number, event))
