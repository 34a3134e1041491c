"""Breakdown of the time of a step: the ideal time of the cluster, and the kinds of overhead on
which the seconds above the ideal time are spent.

Each second in which a device runs a task is either work that a single device would also do, or
overhead of one of several kinds.
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
from autopipe.passes.cost.stage_work import stage_collective_seconds, stage_work
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.limits import step_under_1f1b
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class TaskOverhead:
    """Overhead in the seconds of one task. The remaining seconds of the task are work and launch
    overhead.
    """

    exchange_s: float = 0.0
    """Seconds of collectives among the devices of the stage."""
    recomputation_s: float = 0.0
    """Seconds in which a backward recomputes the forward, including collectives of the forward."""
    repetition_s: float = 0.0
    """Seconds of redundant computation: other devices compute the same results for the same
    samples.
    """
    host_s: float = 0.0
    """Seconds in which the device waits for the host to launch operators."""


@dataclass(frozen=True, slots=True)
class StageOverhead:
    """Overhead in each task of a stage, on each of the stage's devices."""

    forward: TaskOverhead
    backward: TaskOverhead
    """Overhead of an unsplit backward or of the first half of a split backward. The second half has
    no overhead except that the device may wait for the host.
    """


def stage_overheads(
    problem: Problem, placement: Placement, prediction: Prediction
) -> tuple[StageOverhead, ...]:
    """Return, for each stage, the overhead in its tasks."""
    works = stage_work(problem, placement)
    # Redundancy by (pipeline, node): the number of devices that compute a node for equal samples,
    # times the fraction of the node that each device computes.
    copies: dict[tuple[int, int], float] = defaultdict(float)
    for work in works:
        devices = len(work.stage.devices)
        for node in work.nodes:
            copies[work.stage.pipeline, node.index] += devices * node.sharing.share
    found = []
    for work, predicted in zip(works, prediction.stages, strict=True):
        problem_of_stage = work.problem
        stage = work.stage
        forward_exchange_s, backward_exchange_s = stage_collective_seconds(work)
        redundant_fractions = np.array(
            [1 - 1 / max(1.0, copies[stage.pipeline, node.index]) for node in work.nodes]
        )
        shares = np.array([node.sharing.share for node in work.nodes])
        nodes = [problem_of_stage.work[node.index] for node in work.nodes]
        device_types = {problem_of_stage.cluster.devices[device] for device in stage.devices}
        seconds = [
            node_seconds(nodes, device_type, problem_of_stage.precision, shares)
            for device_type in device_types
        ]
        forward_redundant_s, backward_redundant_s = (
            max(float((node_s[direction] * redundant_fractions).sum()) for node_s in seconds)
            for direction in (0, 1)
        )
        forward_wait_s = predicted.host_wait_s(Phase.FORWARD)
        backward_wait_s = predicted.host_wait_s(Phase.BACKWARD)
        recomputation_s = 0.0
        if stage.recompute and problem_of_stage.train:
            recomputation_s = predicted.forward_s - forward_wait_s
        found.append(
            StageOverhead(
                TaskOverhead(forward_exchange_s, 0.0, forward_redundant_s, forward_wait_s),
                TaskOverhead(
                    backward_exchange_s, recomputation_s, backward_redundant_s, backward_wait_s
                ),
            )
        )
    return tuple(found)


def _single_device_seconds(problem: Problem) -> list[tuple[float, float]]:
    """Return (step, update) for each device: the seconds in which this device alone would run the
    problem's step, and the seconds of the optimizer update in it.

    Memory limits, launch overhead and waits for the host are ignored. The number of micro-batches
    therefore has no influence on the times of operators that are not measured.
    """

    @cache
    def without_overhead(device: Device) -> Device:
        """Return the device without launch overhead and waits for the host."""
        tasks = (
            None
            if device.tasks is None
            else replace(device.tasks, forward_s=0.0, backward_s=0.0, waiting_s=0.0)
        )
        return replace(device, launch_latency_s=0.0, host_launch_s=0.0, tasks=tasks)

    nodes = tuple(range(len(problem.graph.nodes)))
    devices = problem.cluster.devices
    without_launches = replace(
        problem, cluster=replace(problem.cluster, devices=tuple(map(without_overhead, devices)))
    )
    steps = {}
    for index, device in enumerate(devices):
        if device not in steps:
            stage = Stage(nodes, (index,), problem.micro_batch_size)
            (cost,) = stage_costs(without_launches, Placement((stage,)))
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
    """Return the breakdown of a step that runs `schedule` and takes `step_s` seconds."""
    silent_s = step_s
    if prediction.messages:
        groups = tuple(stage.devices for stage in placement.stages)
        silent_s = simulate(schedule, groups, _without_messages(prediction)).end
    return _breakdown(problem, placement, _scheduled_counts(schedule), prediction, step_s, silent_s)


def breakdown_under_1f1b(
    problem: Problem, placement: Placement, prediction: Prediction, step_s: float
) -> Breakdown:
    """Return the breakdown of a step that runs 1F1B and takes `step_s` seconds. If the stages form
    a chain, the step is computed without a list of tasks.
    """
    stages = StageGraph.of(problem, placement)
    counts: list[TaskCounts] = [Counter() for _ in range(problem.cluster.size)]
    for index, stage in enumerate(placement.stages):
        count = len(stages.micro_batches_of(index, problem.micro_batches))
        for device in stage.devices:
            counts[device].update(
                {(index, Phase.FORWARD): count, (index, Phase.BACKWARD): count * problem.train}
            )
    silent_s = step_s
    if prediction.messages:
        silent_s = step_under_1f1b(
            stages, _without_messages(prediction), problem.micro_batches, problem.train
        ).end
    return _breakdown(problem, placement, counts, prediction, step_s, silent_s)


TaskCounts = Counter[tuple[int, Phase]]
"""Number of tasks that a device runs in a step, by (stage, phase)."""


def _scheduled_counts(schedule: Schedule) -> list[TaskCounts]:
    """Return the number of tasks of each device by (stage, phase)."""
    # Devices of one stage usually share one list object. The tasks of a shared list are counted
    # once, and the count is reused for all of its devices.
    orders = {id(order): order for order in schedule.tasks}
    counts = {
        key: Counter((task.stage, task.phase) for task in order) for key, order in orders.items()
    }
    return [counts[id(order)] for order in schedule.tasks]


def _without_messages(prediction: Prediction) -> Prediction:
    """Return the prediction with messages that have 0 bytes and take no time."""
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
    silent_s: float,
) -> Breakdown:
    """Return the breakdown of a step that takes `step_s` seconds and would take `silent_s` seconds
    if messages took no time. `counts` contains, for each device, its number of tasks by (stage,
    phase).
    """
    device_seconds = _seconds_by_kind(
        placement, counts, prediction, stage_overheads(problem, placement, prediction)
    )
    single_device = _single_device_seconds(problem)
    rate = sum(1 / step for step, _ in single_device if step)
    ideal = 1 / rate if rate else 0.0
    weights = [ideal / step if step else 1 / len(single_device) for step, _ in single_device]

    def average(values: Iterable[float]) -> float:
        """Return the mean of one value per device. The weight of a device is its fraction of the
        cluster's speed.
        """
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    def average_of(kind: str) -> float:
        """Return the mean over devices of the seconds of one kind of work."""
        return average(each[kind] for each in device_seconds)

    totals = [sum(each.values()) for each in device_seconds]
    update = average(
        weight * update_s for weight, (_, update_s) in zip(weights, single_device, strict=True)
    )
    return Breakdown(
        ideal_s=ideal,
        bubble_s=silent_s - max(totals),
        imbalance_s=average(max(totals) - total for total in totals),
        exposed_p2p_s=step_s - silent_s,
        collectives_s=average_of("exchange"),
        gradients_s=average_of("gradients"),
        recomputation_s=average_of("recomputation"),
        redundant_compute_s=average_of("repetition"),
        update_s=average_of("update") - update,
        launch_overhead_s=average_of("work") - (ideal - update),
        host_s=average_of("host"),
    )


def _seconds_by_kind(
    placement: Placement,
    counts: Sequence[TaskCounts],
    prediction: Prediction,
    parts: Sequence[StageOverhead],
) -> list[dict[str, float]]:
    """Return, for each device, the seconds that it spends in a step on each kind of work. Idle time
    is omitted. `counts` contains, for each device, its number of tasks by (stage, phase), and
    `parts` the overhead in the tasks of each stage.
    """
    kinds = "work", "exchange", "recomputation", "repetition", "host", "gradients", "update"
    found = [dict.fromkeys(kinds, 0.0) for _ in counts]
    for seconds_of, tasks in zip(found, counts, strict=True):
        for (stage, phase), count in tasks.items():
            part = parts[stage].forward if phase is Phase.FORWARD else parts[stage].backward
            if phase is Phase.WEIGHT_GRADIENT:
                part = TaskOverhead()
            overhead = part.exchange_s, part.recomputation_s, part.repetition_s
            waits_s = prediction.stages[stage].host_wait_s(phase)
            total_s = prediction.stages[stage].seconds(phase)
            work_s = total_s - (overhead[0] + overhead[1] + overhead[2]) - waits_s
            for kind, seconds in zip(kinds, (work_s, *overhead, waits_s), strict=False):
                seconds_of[kind] += count * seconds
    for placed, predicted in zip(placement.stages, prediction.stages, strict=True):
        for device in placed.devices:
            found[device]["gradients"] += predicted.gradient_s
            found[device]["update"] += predicted.update_s
    return found
