"""A step of a schedule, event by event: compute, messages, gradient all-reduce, update."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.prediction import Prediction, StagePrediction
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.timeline import Span, Timeline, Transfer
from autopipe.passes.schedule.footprint import memory_curves, static_memory
from autopipe.passes.schedule.wires import HALF, PHASES, WHOLE, kind_of, wires_of

StageDevices = Sequence[Sequence[int]]
"""The device group of each stage."""


def simulate(schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> Timeline:
    """The timeline of one step.

    A task starts when it is next on every device of its stage and all that is sent to it has arrived. Messages leave as
    soon as their task is done and overlap with computation; those of one directed link follow one another. Of a split
    backward the first half receives and sends; the second waits for the first alone. When a
    device has run its last task, gradients are summed stage by stage (a stage's devices together) and parameters
    updated, as the generated programs do.
    """
    costs = prediction.stages
    run = _Run(schedule, stage_devices, prediction)
    run.until_done()
    spans = tuple(sorted(run.spans, key=lambda span: (span.device, span.start, span.end)))
    train = any(task.phase is not Phase.FORWARD for order in schedule.tasks for task in order)
    static = static_memory(schedule.devices, stage_devices, costs)
    end = _step_end(schedule, stage_devices, costs, spans)
    return Timeline(spans, tuple(run.transfers), memory_curves(static, costs, spans, train), static, end)


class _Run:
    """The state of the simulation between two events.

    A task is a number, its kind (stage and phase) times `count` plus its micro-batch: steps have many tasks. No stage
    has more than `count` micro-batches.
    """

    def __init__(self, schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> None:
        self.schedule = schedule
        last = max((task.micro_batch for order in schedule.tasks for task in order), default=0)
        self.count = max(schedule.micro_batches, last + 1)
        kinds = [(stage, phase) for stage in range(len(prediction.stages)) for phase in PHASES]
        self.devices = [stage_devices[stage] for stage, _ in kinds]
        self.seconds = [prediction.stages[stage].seconds(phase) for stage, phase in kinds]
        self.wires = wires_of(prediction.messages, len(prediction.stages))
        self.orders = [[self._number(task) for task in order] for order in schedule.tasks]
        half = PHASES.index(Phase.INPUT_GRADIENT)
        self.split = {task for order in self.orders for task in order if task // self.count % len(PHASES) == half}
        self.position = [0] * schedule.devices
        self.ready: dict[int, int] = {}
        """For each task that is next on some of its devices, how many of them are idle."""
        self.arrived: dict[int, int] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, bool]] = []
        self.made = 0
        """Number of events so far: those of one instant are handled in the order in which they were made."""
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []

    def until_done(self) -> None:
        for device in range(self.schedule.devices):
            self._go_on(device, 0.0)
        while self.events:
            now, _, task, is_end = heapq.heappop(self.events)
            if is_end:
                self._send(task, now)
                for device in self.devices[task // self.count]:
                    self._go_on(device, now)
            else:
                self.arrived[task] = self.arrived.get(task, 0) + 1
                self._start_if_it_can(task, now)
        for device, order in enumerate(self.schedule.tasks):
            if self.position[device] < len(order):
                raise InfeasibleError(f"{order[self.position[device]]} never starts", where=f"device {device}")

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
        awaited = self.wires.awaited[kind]
        if self.arrived.get(task, 0) < awaited[task % self.count % len(awaited)]:
            return
        end = now + self.seconds[kind]
        named = self.schedule.tasks[group[0]][self.position[group[0]]]
        del self.ready[task]
        for member in group:
            self.position[member] += 1
            self.spans.append(Span(member, named, now, end))
        self._schedule(end, task, is_end=True)

    def _send(self, task: int, now: float) -> None:
        kind, micro_batch = divmod(task, self.count)
        sends = self.wires.sends[kind]
        for wire in sends[micro_batch % len(sends)]:
            source, target = wire.source, wire.target
            receiver = wire.kind * self.count + micro_batch // wire.own_turns * wire.turns + wire.turn
            if receiver + HALF * self.count in self.split and wire.kind % len(PHASES) == WHOLE:
                receiver += HALF * self.count
            if source == target or wire.bytes == 0:
                self._schedule(now, receiver, is_end=False)
                continue
            start = max(now, self.link_free.get((source, target), 0.0))
            end = start + wire.seconds
            self.link_free[source, target] = end
            named = Task(kind // len(PHASES), PHASES[kind % len(PHASES)], micro_batch)
            self.transfers.append(Transfer(source, target, named, wire.bytes, start, end))
            self._schedule(end, receiver, is_end=False)

    def _number(self, task: Task) -> int:
        return kind_of(task.stage, task.phase) * self.count + task.micro_batch

    def _schedule(self, time: float, task: int, is_end: bool) -> None:
        self.made += 1
        heapq.heappush(self.events, (time, self.made, task, is_end))


def _step_end(
    schedule: Schedule, stage_devices: StageDevices, costs: Sequence[StagePrediction], spans: Sequence[Span]
) -> float:
    """When the last device has summed its gradients and updated its parameters."""
    free = [0.0] * schedule.devices
    for span in spans:
        free[span.device] = max(free[span.device], span.end)
    for stage in reversed(range(len(costs))):
        group = stage_devices[stage]
        if not costs[stage].gradient_s:
            continue  # nobody to wait for
        end = max(free[device] for device in group) + costs[stage].gradient_s
        for device in group:
            free[device] = end
    for stage, cost in enumerate(costs):
        for device in stage_devices[stage]:
            free[device] += cost.update_s
    return max(free, default=0.0)
