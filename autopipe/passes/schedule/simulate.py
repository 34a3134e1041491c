"""Simulator of one training or inference step: computation, messages between stages, gradient
all-reduce, optimizer update, and memory in use over time.

Devices of one stage with equal task lists start and end each task at equal times. The simulation
therefore runs one device of each pipeline rank (a set of such devices), and one pair of devices of
each set of links with equal messages. The resulting times equal those of a simulation of all
devices, to the last bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import (
    DeviceGroups,
    Phase,
    Schedule,
    Task,
    expand_to_devices,
    group_equal_devices,
    groups_by_stage,
)
from autopipe.ir.timeline import (
    Links,
    Message,
    Prediction,
    Span,
    StagePrediction,
    StepEndKind,
    StepEndSpan,
    Timeline,
    Transfer,
)

StageDevices = Sequence[Sequence[int]]
"""For each stage, the indices of its devices."""

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
_UNSPLIT = _PHASES.index(Phase.BACKWARD)
_HALF = _PHASES.index(Phase.INPUT_GRADIENT) - _UNSPLIT
"""Difference between the indices in `_PHASES` of the first half of a split backward and of an
unsplit backward.
"""


class _MessageEdge(NamedTuple):
    """A message that the tasks of one stage and phase send to tasks of another stage.

    Micro-batch m of the sending stage sends the message to micro-batch m // `sent_every` *
    `received_every` + `received_index` of the receiving stage.
    """

    kind: int
    """Kind of the receiving task, as an integer: stage * len(_PHASES) + index of its phase."""
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
    """Return (sends, awaited): the messages that tasks send and wait for. Both are indexed by the
    kind of task, which is stage * len(_PHASES) + index of the phase.

    - sends[kind][i]: messages that a task of micro-batch m sends, where i = m mod len(sends[kind]).
    - awaited[kind][i]: number of messages that a task of micro-batch m waits for, where i = m mod
      len(awaited[kind]).

    A message carries an activation from source to target, and its gradient in the opposite
    direction. Gradients are sent and received by an unsplit backward and by the first half of a
    split backward. In `sends`, the receiver of a gradient is always an unsplit backward; the
    simulation redirects the message if the receiving task is split.
    """
    periods = [1] * stages
    for message in messages:
        for stage, micro_batches in (
            (message.source_stage, message.source_slice),
            (message.target_stage, message.target_slice),
        ):
            periods[stage] = math.lcm(periods[stage], micro_batches.of)
    sends: list[list[list[_MessageEdge]]] = [
        [[] for _ in range(period)] for period in periods for _ in _PHASES
    ]
    awaited = [[0] * period for period in periods for _ in _PHASES]
    for message in messages:
        activation = (message.source, message.target, message.forward_bytes, message.forward_s)
        gradient = (message.target, message.source, message.backward_bytes, message.backward_s)
        source = message.source_stage * len(_PHASES)
        target = message.target_stage * len(_PHASES)
        source_slice = message.source_slice
        target_slice = message.target_slice
        directions = [(source, target, source_slice, target_slice, activation, target)]
        for half in (0, _HALF):
            sender = target + _UNSPLIT + half
            receiver = source + _UNSPLIT
            directions.append(
                (sender, receiver, target_slice, source_slice, gradient, receiver + half)
            )
        for sender, receiver, sending, receiving, transfer, waiting in directions:
            edge = _MessageEdge(receiver, sending.of, receiving.of, receiving.index, *transfer)
            for index in range(sending.index, len(sends[sender]), sending.of):
                sends[sender][index].append(edge)
            for index in range(receiving.index, len(awaited[waiting]), receiving.of):
                awaited[waiting][index] += 1
    return sends, awaited


@dataclass(frozen=True, slots=True)
class DeviceSymmetry:
    """A step reduced to one device of each pipeline rank. A pipeline rank here is a set of devices
    with equal stages and equal task lists.
    """

    schedule: Schedule
    """The schedule with one task list per pipeline rank."""
    groups: tuple[tuple[int, ...], ...]
    """For each stage, the indices of the pipeline ranks that run it."""
    prediction: Prediction
    """The prediction for all stages, with the messages of only the first pair of devices of each
    entry of `links`.
    """
    pipeline_ranks: DeviceGroups
    """For each pipeline rank, its devices."""
    links: Links
    """Pairs of devices that exchange messages, grouped into sets with equal messages."""


def device_symmetry(
    schedule: Schedule, stage_devices: StageDevices, prediction: Prediction
) -> DeviceSymmetry:
    """Return the step reduced to one device of each pipeline rank and one pair of devices of each
    set of equal pairs.

    Two pairs of devices are equal if their devices belong to the same pipeline ranks and they
    exchange equal messages in both directions.
    """
    pipeline_ranks = group_equal_devices(stage_devices, schedule.tasks)
    messages_of_pair: dict[tuple[int, int], list[Message]] = {}
    for message in prediction.messages:
        low = min(message.source, message.target)
        high = max(message.source, message.target)
        messages_of_pair.setdefault((low, high), []).append(message)
    rank_of_device = {
        device: index for index, devices in enumerate(pipeline_ranks) for device in devices
    }
    links: dict[Hashable, list[tuple[int, int]]] = {}
    for (low, high), exchanged in messages_of_pair.items():
        # The pair begins with the sender of its first message. Otherwise two equal pairs whose
        # devices are numbered in opposite orders would count as different.
        pair = (low, high) if exchanged[0].source == low else (high, low)
        content = tuple(
            (replace(message, source=0, target=0), message.source == pair[0])
            for message in exchanged
        )
        # ~device is negative, so a device without a pipeline rank equals no other device.
        ends = (rank_of_device.get(device, ~device) for device in pair)
        links.setdefault((*ends, content), []).append(pair)
    first_pairs = {pairs[0] for pairs in links.values()}
    messages = tuple(
        message
        for message in prediction.messages
        if first_pairs & {(message.source, message.target), (message.target, message.source)}
    )
    return DeviceSymmetry(
        Schedule(
            schedule.micro_batches, tuple(schedule.tasks[devices[0]] for devices in pipeline_ranks)
        ),
        groups_by_stage(stage_devices, pipeline_ranks),
        replace(prediction, messages=messages),
        pipeline_ranks,
        tuple(map(tuple, links.values())),
    )


Curve = tuple[tuple[float, int], ...]
"""Memory of a device over time: pairs (time in seconds, bytes in use from this time on), in
ascending order of time.
"""


def static_memory(
    devices: int, stage_devices: StageDevices, costs: Sequence[StagePrediction]
) -> tuple[int, ...]:
    """Return the bytes of each device that are in use during the whole step: parameters, gradients,
    optimizer state and message buffers. `devices` is the number of devices.
    """
    static = [0] * devices
    for stage, cost in enumerate(costs):
        for device in stage_devices[stage]:
            static[device] += cost.static_bytes
    return tuple(static)


def _memory_curves(
    static: Sequence[int], costs: Sequence[StagePrediction], spans: Sequence[Span], train: bool
) -> tuple[Curve, ...]:
    """Return the bytes in use over time on each device.

    - The activations that a forward saves are in use from the start of the forward to the end of
      its backward, or to the end of the first half of a split backward.
    - The tensors that the second half of a split backward needs are in use from the end of the
      first half to the end of the second half.
    - Temporary memory is in use during a backward or the first half of a split backward. If the
      step does not train, it is in use during a forward instead.

    Bytes that are freed at an instant are available to a task that starts at that instant.
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
"""Kinds of events: a message arrives at a task, and a task ends."""


def simulate(schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> Timeline:
    """Return the timeline of one step.

    A task starts when it is the next task on each device of its stage and all of its messages have
    arrived. A task sends its messages when it ends. Messages overlap with computation; messages
    over one directed link follow one another. Of the two halves of a split backward, only the first
    sends and receives messages. After the last task of each device, gradients are all-reduced stage
    by stage over all devices of the stage, last stage first. Then each device updates its
    parameters.

    Raises InfeasibleError if a task never starts, because the schedule deadlocks.
    """
    costs = prediction.stages
    reduced = device_symmetry(schedule, stage_devices, prediction)
    run = _Simulation(
        reduced.schedule,
        reduced.groups,
        reduced.prediction,
        [devices[0] for devices in reduced.pipeline_ranks],
    )
    run.run_to_end()
    spans = tuple(sorted(run.spans, key=lambda span: (span.device, span.start, span.end)))
    train = any(
        task.phase is not Phase.FORWARD for order in reduced.schedule.tasks for task in order
    )
    static = static_memory(schedule.devices, stage_devices, costs)
    curves = _memory_curves(static, costs, spans, train)
    memory = expand_to_devices(
        reduced.pipeline_ranks, [curves[devices[0]] for devices in reduced.pipeline_ranks]
    )
    ends = tuple(sorted(run.ends, key=lambda span: (span.device, span.start, span.end)))
    return Timeline(
        spans,
        tuple(run.transfers),
        memory,
        static,
        run.end,
        reduced.pipeline_ranks,
        reduced.links,
        ends,
    )


class _Simulation:
    """State of a simulation between two events.

    A task is represented by the integer kind * `count` + micro-batch, because a step can have
    millions of tasks. `count` exceeds the largest micro-batch index. The kinds are numbered as
    follows:

    - stage * len(_PHASES) + index of the phase;
    - then one kind per gradient all-reduce of a stage, last stage first;
    - then one kind per update of a device.

    Gradient all-reduces and updates that take no time have no kind.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage_devices: StageDevices,
        prediction: Prediction,
        names: Sequence[int],
    ) -> None:
        self.schedule = schedule
        # The number by which results and errors refer to each device.
        self.names = names
        stages = prediction.stages
        last = max((task.micro_batch for order in schedule.tasks for task in order), default=0)
        self.count = max(schedule.micro_batches, last + 1)
        kinds = [(stage, phase) for stage in range(len(stages)) for phase in _PHASES]
        # Number of task kinds that are a phase of a stage. Kinds from this number on are the work
        # after the last task: gradient all-reduces and updates.
        self.phases = len(kinds)
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
        # For each kind of work after the last task, in the order of the kinds from `phases` on:
        # (gradient all-reduce or update, stage). The stage of an update is None.
        self.end_kinds: list[tuple[StepEndKind, int | None]] = []
        updates = [0.0] * schedule.devices
        for stage, cost in reversed(list(enumerate(stages))):
            self._append_end_task(
                StepEndKind.GRADIENT_SUM, stage, stage_devices[stage], cost.gradient_s
            )
            for device in stage_devices[stage]:
                updates[device] += cost.update_s
        for device, seconds in enumerate(updates):
            self._append_end_task(StepEndKind.UPDATE, None, (device,), seconds)
        self.position = [0] * schedule.devices
        # For each task that is the next one on at least one idle device: the number of idle devices
        # on which it is next. The task cannot start before this number is the size of its device
        # group.
        self.ready: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.began: dict[int, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, int]] = []
        """Heap of (time, sequence number, task, event). Events of one instant are handled in the
        order in which they were added.
        """
        self.event_count = 0
        self.spans: list[Span] = []
        self.ends: list[StepEndSpan] = []
        self.transfers: list[Transfer] = []
        self.end = 0.0

    def _append_end_task(
        self, kind: StepEndKind, stage: int | None, devices: Sequence[int], seconds: float
    ) -> None:
        """Append a gradient all-reduce or an update, which has no messages, to the orders of its
        devices, unless it takes no time.
        """
        if seconds:
            self.end_kinds.append((kind, stage))
            for device in devices:
                self.orders[device].append(len(self.seconds) * self.count)
            self.devices.append(devices)
            self.seconds.append(seconds)
            self.sends.append([[]])
            self.awaited.append([0])

    def run_to_end(self) -> None:
        """Run the simulation until no event is left. Raises InfeasibleError if a task has not
        started.
        """
        for device in range(self.schedule.devices):
            self._become_idle(device, 0.0)
        while self.events:
            now, _, number, event = heapq.heappop(self.events)
            if event == _ENDS:
                self._finish(number, now)
            else:
                self.arrived[number] = self.arrived.get(number, 0) + 1
                self._start_if_ready(number, now)
        for device, order in enumerate(self.schedule.tasks):
            if self.position[device] < len(order):
                raise InfeasibleError(
                    f"the schedule deadlocks: task {order[self.position[device]]} never starts",
                    where=f"device {self.names[device]}",
                )

    def _become_idle(self, device: int, now: float) -> None:
        """Note that the device, which is idle now, waits for the next task of its order. Start this
        task if all of its devices wait for it and all of its messages have arrived.
        """
        position = self.position[device]
        if position < len(self.orders[device]):
            task = self.orders[device][position]
            self.ready[task] = self.ready.get(task, 0) + 1
            self._start_if_ready(task, now)

    def _start_if_ready(self, task: int, now: float) -> None:
        """Start the task if all of its devices are idle and all of its messages have arrived."""
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
        """End the task: record its spans, send its messages, and make its devices idle."""
        kind, micro_batch = divmod(task, self.count)
        group = self.devices[kind]
        start = self.began.pop(task)
        if kind < self.phases:
            finished = self.schedule.tasks[group[0]][self.position[group[0]] - 1]
            self.spans += [Span(self.names[member], finished, start, now) for member in group]
            sends = self.sends[kind]
            for edge in sends[micro_batch % len(sends)]:
                self._send(edge, finished, now)
        else:
            self.ends += [
                StepEndSpan(self.names[member], *self.end_kinds[kind - self.phases], start, now)
                for member in group
            ]
        self.end = max(self.end, now)
        for device in group:
            self._become_idle(device, now)

    def _send(self, edge: _MessageEdge, task: Task, now: float) -> None:
        """Send a message of `task`, which ends at `now`. The message starts when its link is free;
        its arrival becomes an event.
        """
        micro_batch = (
            task.micro_batch // edge.sent_every * edge.received_every + edge.received_index
        )
        receiver = edge.kind * self.count + micro_batch
        if receiver + _HALF * self.count in self.split and edge.kind % len(_PHASES) == _UNSPLIT:
            receiver += _HALF * self.count
        if edge.source != edge.target and edge.bytes:
            link = edge.source, edge.target
            start = max(now, self.link_free.get(link, 0.0))
            now = self.link_free[link] = start + edge.seconds
            self.transfers.append(Transfer(*link, task, edge.bytes, start, now))
        self._add_event(now, receiver, _ARRIVES)

    def _add_event(self, time: float, number: int, event: int) -> None:
        """Add an event for a task to the heap: `time` in seconds, the integer `number` of the task,
        and the kind `event` (`_ARRIVES` or `_ENDS`).
        """
        self.event_count += 1
        heapq.heappush(self.events, (time, self.event_count, number, event))
