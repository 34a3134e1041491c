"""Schedules whose backwards are in halves."""

from __future__ import annotations

from autopipe.ir.schedule import Phase, Schedule, Task


def halved(
    schedule: Schedule, lag: int, whole: frozenset[tuple[int, int]] = frozenset()
) -> Schedule:
    """The same order with backwards in halves, the second behind the `lag`-th later task of its
    stage; `whole` (stage, micro-batch) stay as they are.
    """
    return Schedule(
        schedule.micro_batches, tuple(_halved(order, lag, whole) for order in schedule.tasks)
    )


def _halved(
    order: tuple[Task, ...], lag: int, whole: frozenset[tuple[int, int]]
) -> tuple[Task, ...]:
    keyed: list[tuple[int, Task]] = []
    for place, task in enumerate(order):
        if task.phase is not Phase.BACKWARD or (task.stage, task.micro_batch) in whole:
            keyed.append((2 * place, task))
            continue
        same = [later for later in range(place, len(order)) if order[later].stage == task.stage][
            : lag + 1
        ]
        keyed.append((2 * place, Task(task.stage, Phase.INPUT_GRADIENT, task.micro_batch)))
        keyed.append((2 * same[-1] + 1, Task(task.stage, Phase.WEIGHT_GRADIENT, task.micro_batch)))
    return tuple(task for _, task in sorted(keyed, key=lambda each: each[0]))
