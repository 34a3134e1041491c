"""A step of a schedule, event by event: compute, messages, gradient all-reduce, update."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Phase, Schedule, Task, on_each_device
from autopipe.ir.timeline import Prediction, Span, Timeline, Transfer
from autopipe.passes.schedule.alike import device_symmetry
from autopipe.passes.schedule.footprint import memory_curves, static_memory
from autopipe.passes.schedule.wires import HALF, PHASES, WHOLE, kind_of, message_edges

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
        """What each device is called: it may stand for several."""
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
