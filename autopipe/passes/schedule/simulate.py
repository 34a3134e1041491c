"""A step of a schedule, event by event: compute, messages, gradient all-reduce, update."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.prediction import Message, Prediction, StagePrediction
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.timeline import Span, Timeline, Transfer
from autopipe.passes.schedule.footprint import memory_curves, static_memory

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

    A task is a number, its kind (stage and phase) times the micro-batches plus its micro-batch: steps have many tasks.
    """

    def __init__(self, schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> None:
        self.schedule, self.count = schedule, schedule.micro_batches
        kinds = [(stage, phase) for stage in range(len(prediction.stages)) for phase in _PHASES]
        self.devices = [stage_devices[stage] for stage, _ in kinds]
        self.seconds = [prediction.stages[stage].seconds(phase) for stage, phase in kinds]
        self.sends, self.awaited = _sends(prediction.messages, len(kinds))
        self.orders = [[self._number(task) for task in order] for order in schedule.tasks]
        half = _PHASES.index(Phase.INPUT_GRADIENT)
        self.split = {task for order in self.orders for task in order if task // self.count % len(_PHASES) == half}
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
        if self.ready.get(task, 0) < len(group) or self.arrived.get(task, 0) < self.awaited[kind]:
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
        for receiving, source, target, size, seconds in self.sends[kind]:
            receiver = receiving * self.count + micro_batch
            if receiver + _HALF * self.count in self.split and receiving % len(_PHASES) == _WHOLE:
                receiver += _HALF * self.count
            if source == target or size == 0:
                self._schedule(now, receiver, is_end=False)
                continue
            start = max(now, self.link_free.get((source, target), 0.0))
            end = start + seconds
            self.link_free[source, target] = end
            named = Task(kind // len(_PHASES), _PHASES[kind % len(_PHASES)], micro_batch)
            self.transfers.append(Transfer(source, target, named, size, start, end))
            self._schedule(end, receiver, is_end=False)

    def _number(self, task: Task) -> int:
        return _kind(task.stage, task.phase) * self.count + task.micro_batch

    def _schedule(self, time: float, task: int, is_end: bool) -> None:
        self.made += 1
        heapq.heappush(self.events, (time, self.made, task, is_end))


_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
_WHOLE = _PHASES.index(Phase.BACKWARD)
_HALF = _PHASES.index(Phase.INPUT_GRADIENT) - _WHOLE
"""From the number of a backward's kind to that of its first half, which receives in its place."""

Sent = tuple[int, int, int, int, float]
"""Kind of the task that receives, device that sends, device that receives, bytes, seconds."""


def _kind(stage: int, phase: Phase) -> int:
    return stage * len(_PHASES) + _PHASES.index(phase)


def _sends(messages: Sequence[Message], kinds: int) -> tuple[list[list[Sent]], list[int]]:
    """What is sent after a task of each kind, and how many messages one of each kind waits for.

    Gradients go to whole backwards here, and come from whole ones and first halves alike.
    """
    sends: list[list[Sent]] = [[] for _ in range(kinds)]
    awaited = [0] * kinds
    for each in messages:
        forward, backward = (
            [_kind(stage, phase) for stage in (each.source_stage, each.target_stage)] for phase in _PHASES[:2]
        )
        sends[forward[0]].append((forward[1], each.source, each.target, each.forward_bytes, each.forward_s))
        awaited[forward[1]] += 1
        for half in (0, _HALF):
            sends[backward[1] + half].append(
                (backward[0], each.target, each.source, each.backward_bytes, each.backward_s)
            )
            awaited[backward[0] + half] += 1
    return sends, awaited


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
