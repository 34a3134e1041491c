"""True if a schedule can run: every task there once, and no circle of waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopipe.ir.lanes import lane_groups, lanes_of
from autopipe.ir.schedule import Phase, Schedule, Task, WrongScheduleError
from autopipe.ir.stage_graph import StageGraph, sharing

_Number = tuple[int, Phase, int]
"""A task's stage, phase and micro-batch: tasks are looked up by the million, and tuples are hashed sooner."""

_TRAIN_PHASES = (
    frozenset({Phase.FORWARD, Phase.BACKWARD}),
    frozenset({Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT}),
)


def check_order(schedule: Schedule, graph: StageGraph, train: bool) -> None:
    """Raise WrongScheduleError, with the offending cell marked, unless some execution respects every device's order."""
    lanes = lanes_of(graph.stage_devices, schedule.tasks)
    firsts = [devices[0] for devices in lanes]
    _check_tasks(schedule, graph, train, firsts)
    groups = lane_groups(graph.stage_devices, lanes)
    needs = _Needs(graph, [schedule.tasks[device] for device in firsts])
    waiting = [deque(schedule.tasks[device]) for device in firsts]
    done: set[_Number] = set()
    moved = True
    while moved:
        moved = False
        for queue in waiting:
            while queue and needs.met(queue[0], done) and _together(queue[0], groups, waiting):
                task = queue[0]
                for lane in groups[task.stage]:
                    waiting[lane].popleft()
                done.add((task.stage, task.phase, task.micro_batch))
                moved = True
    for device, queue in zip(firsts, waiting, strict=True):
        if queue:
            missing = needs.first_missing(queue[0], done)
            reason = f"{queue[0]} waits for {missing}, which can never run" if missing else f"{queue[0]} never starts"
            raise WrongScheduleError(schedule, device, len(schedule.tasks[device]) - len(queue), reason)


class _Needs:
    """Which tasks must be done before a task: those of the stages around it that have samples in common with it."""

    def __init__(self, graph: StageGraph, orders: Sequence[Sequence[Task]]) -> None:
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        self.turns = graph.turns
        for source, target in graph.edges:
            self.before.setdefault(target, []).append(source)
            self.after.setdefault(source, []).append(target)
        halves = {task for order in orders for task in order if task.phase is Phase.INPUT_GRADIENT}
        self.split = {(task.stage, task.micro_batch) for task in halves}
        """Stages and micro-batches whose backward is split: a step may split some and leave others whole."""

    def of(self, task: Task) -> list[_Number]:
        if task.phase is Phase.FORWARD:
            return [
                (stage, Phase.FORWARD, number)
                for stage in self.before.get(task.stage, ())
                for number in self._sharing(task, stage)
            ]
        if task.phase is Phase.WEIGHT_GRADIENT:
            return [(task.stage, Phase.INPUT_GRADIENT, task.micro_batch)]
        later = [
            self._backward(stage, number)
            for stage in self.after.get(task.stage, ())
            for number in self._sharing(task, stage)
        ]
        return [(task.stage, Phase.FORWARD, task.micro_batch), *later]

    def _sharing(self, task: Task, other: int) -> Sequence[int]:
        """The micro-batches of another stage that have samples of the task's."""
        if not self.turns:
            return (task.micro_batch,)
        return sharing(task.micro_batch, self.turns[task.stage], self.turns[other])

    def _backward(self, stage: int, micro_batch: int) -> _Number:
        """The task that gives the gradients of what a stage received."""
        split = (stage, micro_batch) in self.split
        return stage, Phase.INPUT_GRADIENT if split else Phase.BACKWARD, micro_batch

    def met(self, task: Task, done: set[_Number]) -> bool:
        return done.issuperset(self.of(task))

    def first_missing(self, task: Task, done: set[_Number]) -> Task | None:
        return next((Task(*need) for need in self.of(task) if need not in done), None)


def _together(task: Task, groups: Sequence[Sequence[int]], waiting: list[deque[Task]]) -> bool:
    """True if the task is next on all lanes of its stage: a group computes together."""
    return all(waiting[lane] and waiting[lane][0] == task for lane in groups[task.stage])


def _check_tasks(schedule: Schedule, graph: StageGraph, train: bool, devices: Sequence[int]) -> None:
    stage_devices = graph.stage_devices
    for device in devices:
        order = schedule.tasks[device]
        seen: dict[tuple[int, int], frozenset[Phase]] = {}
        """By stage and micro-batch the phases so far."""
        for position, task in enumerate(order):
            if task.stage >= len(stage_devices) or device not in stage_devices[task.stage]:
                raise WrongScheduleError(schedule, device, position, f"stage {task.stage} is not on device {device}")
            phases = seen.get((task.stage, task.micro_batch), frozenset())
            if task.phase in phases:
                raise WrongScheduleError(schedule, device, position, f"{task} stands twice")
            if not 0 <= task.micro_batch < schedule.micro_batches * graph.micro_batch_ratio_at(task.stage):
                raise WrongScheduleError(schedule, device, position, f"there is no micro-batch {task.micro_batch}")
            if task.micro_batch not in graph.micro_batches_of(task.stage, schedule.micro_batches):
                reason = f"micro-batch {task.micro_batch} does not run on the pipeline of stage {task.stage}"
                raise WrongScheduleError(schedule, device, position, reason)
            if not train and task.phase is not Phase.FORWARD:
                raise WrongScheduleError(schedule, device, position, f"{task} is a backward, but nothing trains")
            seen[task.stage, task.micro_batch] = phases | {task.phase}
        _check_complete(schedule, device, seen, graph, train)


def _check_complete(
    schedule: Schedule, device: int, seen: dict[tuple[int, int], frozenset[Phase]], graph: StageGraph, train: bool
) -> None:
    for stage, devices in enumerate(graph.stage_devices):
        if device not in devices:
            continue
        for micro_batch in graph.micro_batches_of(stage, schedule.micro_batches):
            phases = seen.get((stage, micro_batch), frozenset())
            complete = phases in _TRAIN_PHASES if train else phases == {Phase.FORWARD}
            if not complete:
                have = "".join(sorted(phase.value for phase in phases)) or "nothing"
                reason = f"stage {stage} runs {have} on micro-batch {micro_batch}"
                raise WrongScheduleError(schedule, device, max(len(schedule.tasks[device]) - 1, 0), reason)
