"""A step of a schedule, event by event: compute, messages, gradient all-reduce, update."""

from __future__ import annotations

import heapq
from collections import Counter
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
    """The state of the simulation between two events."""

    def __init__(self, schedule: Schedule, stage_devices: StageDevices, prediction: Prediction) -> None:
        self.schedule, self.devices, self.costs = schedule, stage_devices, prediction.stages
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.made = 0
        """Number of events so far: those of one instant are handled in the order in which they were made."""
        self.position = [0] * schedule.devices
        self.busy = [False] * schedule.devices
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, Task, bool]] = []
        self.arrived: Counter[Task] = Counter()
        self.sends = _sends(prediction.messages)
        self.awaited = Counter((target, way) for (_, way), sent in self.sends.items() for target, *_ in sent)
        self.split = {
            (task.stage, task.micro_batch)
            for order in schedule.tasks
            for task in order
            if task.phase is Phase.INPUT_GRADIENT
        }
        """Stages and micro-batches whose backward is split."""

    def until_done(self) -> None:
        for device in range(self.schedule.devices):
            self._start_next(device, 0.0)
        while self.events:
            now, _, task, is_end = heapq.heappop(self.events)
            group = self.devices[task.stage]
            if is_end:
                for device in group:
                    self.busy[device] = False
                self._send(task, now)
                for device in group:
                    self._start_next(device, now)
            else:
                self.arrived[task] += 1
                self._start_next(group[0], now)
        for device, order in enumerate(self.schedule.tasks):
            if self.position[device] < len(order):
                raise InfeasibleError(f"{order[self.position[device]]} never starts", where=f"device {device}")

    def _start_next(self, device: int, now: float) -> None:
        """Start the device's next task if nothing keeps it from starting."""
        order = self.schedule.tasks[device]
        if self.position[device] == len(order):
            return
        task = order[self.position[device]]
        way = _WAYS.get(task.phase)
        if way is not None and self.arrived[task] < self.awaited[task.stage, way]:
            return
        group = self.devices[task.stage]
        if any(self.busy[member] or self._head(member) != task for member in group):
            return
        end = now + self.costs[task.stage].seconds(task.phase)
        for member in group:
            self.busy[member] = True
            self.position[member] += 1
            self.spans.append(Span(member, task, now, end))
        self._schedule(end, task, is_end=True)

    def _head(self, device: int) -> Task | None:
        order = self.schedule.tasks[device]
        return order[self.position[device]] if self.position[device] < len(order) else None

    def _send(self, task: Task, now: float) -> None:
        way = _WAYS.get(task.phase)
        if way is None:
            return
        for stage, source, target, size, seconds in self.sends.get((task.stage, way), ()):
            receiver = Task(stage, self._receiving_phase(stage, way, task.micro_batch), task.micro_batch)
            if source == target or size == 0:
                self._schedule(now, receiver, is_end=False)
                continue
            start = max(now, self.link_free.get((source, target), 0.0))
            end = start + seconds
            self.link_free[source, target] = end
            self.transfers.append(Transfer(source, target, task, size, start, end))
            self._schedule(end, receiver, is_end=False)

    def _receiving_phase(self, stage: int, way: Phase, micro_batch: int) -> Phase:
        """The task of `stage` that takes what is sent forward or backward."""
        return Phase.INPUT_GRADIENT if way is Phase.BACKWARD and (stage, micro_batch) in self.split else way

    def _schedule(self, time: float, task: Task, is_end: bool) -> None:
        self.made += 1
        heapq.heappush(self.events, (time, self.made, task, is_end))


_WAYS = {Phase.FORWARD: Phase.FORWARD, Phase.BACKWARD: Phase.BACKWARD, Phase.INPUT_GRADIENT: Phase.BACKWARD}
"""Which way a task's messages go."""

Sent = tuple[int, int, int, int, float]
"""Stage that receives, device that sends, device that receives, bytes, seconds."""


def _sends(messages: Sequence[Message]) -> dict[tuple[int, Phase], list[Sent]]:
    """What is sent after a task, by its stage and its way."""
    sends: dict[tuple[int, Phase], list[Sent]] = {}
    for each in messages:
        forward = (each.target_stage, each.source, each.target, each.forward_bytes, each.forward_s)
        backward = (each.source_stage, each.target, each.source, each.backward_bytes, each.backward_s)
        sends.setdefault((each.source_stage, Phase.FORWARD), []).append(forward)
        sends.setdefault((each.target_stage, Phase.BACKWARD), []).append(backward)
    return sends


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
