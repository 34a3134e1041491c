"""Whether a schedule can run: every task there once, and no circle of waiting."""

from __future__ import annotations

from collections import deque

from autopipe.ir.schedule import Phase, Schedule, Task, wrong_schedule

_TRAIN_PHASES = (
    frozenset({Phase.FORWARD, Phase.BACKWARD}),
    frozenset({Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT}),
)


def check_order(
    schedule: Schedule, stage_devices: tuple[tuple[int, ...], ...], edges: tuple[tuple[int, int], ...], train: bool
) -> None:
    """Raise InfeasibleError, with the offending cell marked, unless some execution respects every device's order."""
    _check_tasks(schedule, stage_devices, train)
    split = any(task.phase is Phase.INPUT_GRADIENT for order in schedule.tasks for task in order)
    needs = _Needs(edges, split)
    waiting = [deque(order) for order in schedule.tasks]
    done: set[Task] = set()
    moved = True
    while moved:
        moved = False
        for queue in waiting:
            while queue and needs.met(queue[0], done) and _together(queue[0], stage_devices, waiting):
                task = queue[0]
                for device in stage_devices[task.stage]:
                    waiting[device].popleft()
                done.add(task)
                moved = True
    for device, queue in enumerate(waiting):
        if queue:
            missing = needs.first_missing(queue[0], done)
            reason = f"{queue[0]} waits for {missing}, which can never run" if missing else f"{queue[0]} never starts"
            raise wrong_schedule(schedule, device, len(schedule.tasks[device]) - len(queue), reason)


class _Needs:
    """Which tasks must be done before a task."""

    def __init__(self, edges: tuple[tuple[int, int], ...], split: bool) -> None:
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        for source, target in edges:
            self.before.setdefault(target, []).append(source)
            self.after.setdefault(source, []).append(target)
        self.backward = Phase.INPUT_GRADIENT if split else Phase.BACKWARD

    def of(self, task: Task) -> list[Task]:
        if task.phase is Phase.FORWARD:
            return [Task(stage, Phase.FORWARD, task.micro_batch) for stage in self.before.get(task.stage, ())]
        if task.phase is Phase.WEIGHT_GRADIENT:
            return [Task(task.stage, Phase.INPUT_GRADIENT, task.micro_batch)]
        later = [Task(stage, self.backward, task.micro_batch) for stage in self.after.get(task.stage, ())]
        return [Task(task.stage, Phase.FORWARD, task.micro_batch), *later]

    def met(self, task: Task, done: set[Task]) -> bool:
        return all(need in done for need in self.of(task))

    def first_missing(self, task: Task, done: set[Task]) -> Task | None:
        return next((need for need in self.of(task) if need not in done), None)


def _together(task: Task, stage_devices: tuple[tuple[int, ...], ...], waiting: list[deque[Task]]) -> bool:
    """Whether the task is next on all devices of its stage: a group computes together."""
    return all(waiting[device] and waiting[device][0] == task for device in stage_devices[task.stage])


def _check_tasks(schedule: Schedule, stage_devices: tuple[tuple[int, ...], ...], train: bool) -> None:
    for device, order in enumerate(schedule.tasks):
        seen: set[Task] = set()
        for position, task in enumerate(order):
            if task.stage >= len(stage_devices) or device not in stage_devices[task.stage]:
                raise wrong_schedule(schedule, device, position, f"stage {task.stage} is not on device {device}")
            if task in seen:
                raise wrong_schedule(schedule, device, position, f"{task} stands twice")
            if not 0 <= task.micro_batch < schedule.micro_batches:
                raise wrong_schedule(schedule, device, position, f"there is no micro-batch {task.micro_batch}")
            if not train and task.phase is not Phase.FORWARD:
                raise wrong_schedule(schedule, device, position, f"{task} is a backward, but nothing trains")
            seen.add(task)
        _check_complete(schedule, device, seen, stage_devices, train)


def _check_complete(
    schedule: Schedule, device: int, seen: set[Task], stage_devices: tuple[tuple[int, ...], ...], train: bool
) -> None:
    for stage, devices in enumerate(stage_devices):
        if device not in devices:
            continue
        for micro_batch in range(schedule.micro_batches):
            phases = frozenset(phase for phase in Phase if Task(stage, phase, micro_batch) in seen)
            complete = phases in _TRAIN_PHASES if train else phases == {Phase.FORWARD}
            if not complete:
                have = "".join(sorted(phase.value for phase in phases)) or "nothing"
                reason = f"stage {stage} runs {have} on micro-batch {micro_batch}"
                raise wrong_schedule(schedule, device, max(len(schedule.tasks[device]) - 1, 0), reason)
