"""How far a step is from the ideal, and what each second of the distance goes to.

A device's seconds are split into work that one device would do as well, and what comes on top of
it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from autopipe.ir.cluster import Device
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import Breakdown
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph
from autopipe.ir.timeline import Prediction
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import exchange_seconds, stage_work
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.limits import predicted_step
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class TaskParts:
    """Parts of a task's seconds; what is left is work, and what starting it takes."""

    exchange_s: float = 0.0
    """Collectives inside the stage."""
    recomputation_s: float = 0.0
    """The forward that a backward runs again, its collectives included."""
    repetition_s: float = 0.0
    """Computation that other devices do, too, for the same samples."""
    host_s: float = 0.0
    """Seconds in which the device waits for the host to start operators."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parts of a stage's tasks, on each of its devices."""

    forward: TaskParts
    backward: TaskParts
    """Of a whole backward, or of the first half of a split one, but for `host_s`: of the second all
    is work, or waits for the host.
    """


def stage_parts(
    problem: Problem, placement: Placement, prediction: Prediction
) -> tuple[StageParts, ...]:
    works = stage_work(problem, placement)
    copies: dict[tuple[int, int], float] = defaultdict(
        float
    )  # How often each pipeline computes each node.
    for work in works:
        for each in work.nodes:
            copies[work.stage.pipeline, each.index] += len(work.stage.devices) * each.sharing.share
    found = []
    for work, predicted in zip(works, prediction.stages, strict=True):
        own = work.problem
        stage = work.stage
        there, back = exchange_seconds(work)
        repeated = np.array(
            [1 - 1 / max(1.0, copies[stage.pipeline, each.index]) for each in work.nodes]
        )
        shares = np.array([each.sharing.share for each in work.nodes])
        nodes = [own.work[each.index] for each in work.nodes]
        kinds = {own.cluster.devices[device] for device in stage.devices}
        seconds = [node_seconds(nodes, kind, own.precision, shares) for kind in kinds]
        forward, backward = (
            max(float((each[way] * repeated).sum()) for each in seconds) for way in (0, 1)
        )
        waits = predicted.host_wait_s(Phase.FORWARD), predicted.host_wait_s(Phase.BACKWARD)
        again = predicted.forward_s - waits[0] if stage.recompute and own.train else 0.0
        parts = TaskParts(there, 0.0, forward, waits[0]), TaskParts(back, again, backward, waits[1])
        found.append(StageParts(*parts))
    return tuple(found)


def _alone(problem: Problem) -> list[tuple[float, float]]:
    """(step, of that the update) of each device by itself, in seconds, were its memory large
    enough. At the roofline, where launches, starts of tasks and the host take no time, nothing is
    lost to how the batch is divided. What was measured of operators stays.
    """

    @cache
    def at_roofline(device: Device) -> Device:
        tasks = (
            None
            if device.tasks is None
            else replace(device.tasks, forward_s=0.0, backward_s=0.0, waiting_s=0.0)
        )
        return replace(device, launch_latency_s=0.0, host_launch_s=0.0, tasks=tasks)

    nodes = tuple(range(len(problem.graph.nodes)))
    devices = problem.cluster.devices
    launched = replace(
        problem, cluster=replace(problem.cluster, devices=tuple(map(at_roofline, devices)))
    )
    steps = {}
    for index, device in enumerate(devices):
        if device not in steps:
            stage = Stage(nodes, (index,), problem.micro_batch_size)
            (cost,) = stage_costs(launched, Placement((stage,)))
            tasks = problem.micro_batches * (cost.forward_s + cost.backward_s)
            steps[device] = tasks + cost.update_s, cost.update_s
    return [steps[device] for device in devices]


def breakdown(
    problem: Problem,
    placement: Placement,
    schedule: Schedule,
    prediction: Prediction,
    step_s: float,
) -> Breakdown:
    """Return what a step of `step_s` seconds goes to under a schedule."""
    silent_s = step_s
    if prediction.messages:
        groups = tuple(stage.devices for stage in placement.stages)
        silent_s = simulate(schedule, groups, _without_messages(prediction)).end
    return _breakdown(problem, placement, _scheduled_counts(schedule), prediction, step_s, silent_s)


def breakdown_under_1f1b(
    problem: Problem, placement: Placement, prediction: Prediction, step_s: float
) -> Breakdown:
    """Return what a step of `step_s` seconds goes to under 1F1B, of which no list of tasks is made
    for a chain.
    """
    stages = StageGraph.of(problem, placement)
    counts: list[TaskCounts] = [Counter() for _ in range(problem.cluster.size)]
    for index, stage in enumerate(placement.stages):
        run = len(stages.micro_batches_of(index, problem.micro_batches))
        for device in stage.devices:
            counts[device].update(
                {(index, Phase.FORWARD): run, (index, Phase.BACKWARD): run * problem.train}
            )
    silent_s = step_s
    if prediction.messages:
        silent_s = predicted_step(
            stages, _without_messages(prediction), problem.micro_batches, problem.train
        ).end
    return _breakdown(problem, placement, counts, prediction, step_s, silent_s)


TaskCounts = Counter[tuple[int, Phase]]
"""How many tasks of each stage and phase a device runs."""


def _scheduled_counts(schedule: Schedule) -> list[TaskCounts]:
    # Devices of a group share their list.
    orders = {id(order): order for order in schedule.tasks}
    counts = {
        key: Counter((task.stage, task.phase) for task in order) for key, order in orders.items()
    }
    return [counts[id(order)] for order in schedule.tasks]


def _without_messages(prediction: Prediction) -> Prediction:
    """Return the prediction with messages that take no time."""
    messages = tuple(
        replace(each, forward_bytes=0, backward_bytes=0, forward_s=0.0, backward_s=0.0)
        for each in prediction.messages
    )
    return replace(prediction, messages=messages)


def _breakdown(
    problem: Problem,
    placement: Placement,
    counts: Sequence[TaskCounts],
    prediction: Prediction,
    step_s: float,
    silent: float,
) -> Breakdown:
    """Return what a step goes to: each device runs `counts`, and the step takes `silent` if
    messages take no time.
    """
    own = _own_seconds(placement, counts, prediction, stage_parts(problem, placement, prediction))
    single = _alone(problem)
    rate = sum(1 / step for step, _ in single if step)
    ideal = 1 / rate if rate else 0.0
    weights = [ideal / step if step else 1 / len(single) for step, _ in single]

    def average(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    def share(kind: str) -> float:
        return average(each[kind] for each in own)

    totals = [sum(each.values()) for each in own]
    update = average(weight * alone for weight, (_, alone) in zip(weights, single, strict=True))
    return Breakdown(
        ideal_s=ideal,
        bubble_s=silent - max(totals),
        imbalance_s=average(max(totals) - total for total in totals),
        messages_s=step_s - silent,
        collectives_s=share("exchange"),
        gradients_s=share("gradients"),
        recomputation_s=share("recomputation"),
        repetition_s=share("repetition"),
        update_s=share("update") - update,
        launches_s=share("work") - (ideal - update),
        host_s=share("host"),
    )


def _own_seconds(
    placement: Placement,
    counts: Sequence[TaskCounts],
    prediction: Prediction,
    parts: Sequence[StageParts],
) -> list[dict[str, float]]:
    """Seconds of a step in which each device does something, by what it does."""
    kinds = "work", "exchange", "recomputation", "repetition", "host", "gradients", "update"
    found = [dict.fromkeys(kinds, 0.0) for _ in counts]
    for own, tasks in zip(found, counts, strict=True):
        for (stage, phase), count in tasks.items():
            part = parts[stage].forward if phase is Phase.FORWARD else parts[stage].backward
            if phase is Phase.WEIGHT_GRADIENT:
                part = TaskParts()
            spent = part.exchange_s, part.recomputation_s, part.repetition_s
            waits_s = prediction.stages[stage].host_wait_s(phase)
            work = (
                prediction.stages[stage].seconds(phase) - (spent[0] + spent[1] + spent[2]) - waits_s
            )
            for kind, seconds in zip(kinds, (work, *spent, waits_s), strict=False):
                own[kind] += count * seconds
    for placed, predicted in zip(placement.stages, prediction.stages, strict=True):
        for device in placed.devices:
            found[device]["gradients"] += predicted.gradient_s
            found[device]["update"] += predicted.update_s
    return found
