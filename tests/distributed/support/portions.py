"""Schedules of stages whose micro-batches are of different sizes: any order that works, or all
forwards first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task

Samples = range


def samples_of(stages: StageGraph, task: Task) -> Samples:
    """The samples of a task, in units of which every stage's micro-batches are whole numbers."""
    units = math.lcm(*(stages.ratios or (1,))) // stages.micro_batch_ratio_at(task.stage)
    return range(task.micro_batch * units, (task.micro_batch + 1) * units)


def needs_of(stages: StageGraph, task: Task, micro_batches: int) -> Iterator[Task]:
    """The tasks that must be done before a task: those of neighbours that have samples of its own,
    one by one.
    """
    backward = task.phase is not Phase.FORWARD
    if backward:
        yield Task(task.stage, Phase.FORWARD, task.micro_batch)
    own = samples_of(stages, task)
    for source, target in stages.edges:
        here, other = (source, target) if backward else (target, source)
        if here != task.stage:
            continue
        for micro_batch in stages.micro_batches_of(other, micro_batches):
            need = Task(other, task.phase, micro_batch)
            theirs = samples_of(stages, need)
            if own.start < theirs.stop and theirs.start < own.stop:
                yield need


def random_order(
    random: Random, stages: StageGraph, micro_batches: int, train: bool = True
) -> Schedule:
    """Task after task, each any of those whose needs are met: every stage takes its micro-batches
    in order.
    """
    phases = (Phase.FORWARD, Phase.BACKWARD) if train else (Phase.FORWARD,)
    waiting = {
        (stage, phase): [
            Task(stage, phase, each)
            for each in reversed(stages.micro_batches_of(stage, micro_batches))
        ]
        for stage in range(len(stages.stage_devices))
        for phase in phases
    }
    rows: list[list[Task]] = [[] for _ in range(stages.devices)]
    done: set[Task] = set()
    while any(waiting.values()):
        heads = [tasks[-1] for tasks in waiting.values() if tasks]
        task = random.choice(
            [each for each in heads if done.issuperset(needs_of(stages, each, micro_batches))]
        )
        waiting[task.stage, task.phase].pop()
        done.add(task)
        for device in stages.stage_devices[task.stage]:
            rows[device].append(task)
    return Schedule(micro_batches, tuple(map(tuple, rows)))


def forwards_first(stages: StageGraph, micro_batches: int, train: bool = True) -> Schedule:
    """All forwards, then all backwards, round by round."""
    rows: list[list[Task]] = [[] for _ in range(stages.devices)]
    for phase, step in ((Phase.FORWARD, 1), (Phase.BACKWARD, -1))[: 1 + train]:
        for micro_batch in range(micro_batches):
            for stage in range(len(stages.stage_devices))[::step]:
                turns = stages.micro_batch_ratio_at(stage)
                for each in range(micro_batch * turns, (micro_batch + 1) * turns):
                    for device in stages.stage_devices[stage]:
                        rows[device].append(Task(stage, phase, each))
    return Schedule(micro_batches, tuple(map(tuple, rows)))
