"""Breakdown of the seconds of a stage, besides work that one device would do as well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.cluster import Device
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.timeline import Prediction
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import StageWork, exchange_seconds, stage_work
from autopipe.passes.cost.stages import stage_costs


@dataclass(frozen=True, slots=True)
class TaskParts:
    """Parts of a task's seconds; what is left is work, and what starting it takes."""

    exchange_s: float = 0.0
    """Collectives inside the stage."""
    recomputation_s: float = 0.0
    """The forward that a backward runs again, its collectives included."""
    repetition_s: float = 0.0
    """Computation that other devices do, too, for the same samples."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parts of a stage's tasks, on each of its devices."""

    forward: TaskParts
    backward: TaskParts
    """Of a whole backward, or of the first half of a split one: of the second all is work."""


@dataclass(frozen=True, slots=True)
class IdealStep:
    """Step of one device by itself, were its memory large enough and launches free."""

    step_s: float
    update_s: float
    """Of that, the optimizer's update."""


def stage_parts(problem: Problem, placement: Placement, prediction: Prediction) -> tuple[StageParts, ...]:
    """The parts of each stage's tasks, in order."""
    works = stage_work(problem, placement)
    copies = _copies(works)
    return tuple(
        _stage_parts(work, copies[work.stage.pipeline], predicted.forward_s)
        for work, predicted in zip(works, prediction.stages, strict=True)
    )


def alone(problem: Problem) -> tuple[IdealStep, ...]:
    """Step of each device by itself, at the roofline: nothing is lost to how the batch is divided."""
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = {device: _at_roofline(device) for device in dict.fromkeys(problem.cluster.devices)}
    cluster = replace(problem.cluster, devices=tuple(devices[each] for each in problem.cluster.devices))
    launched = replace(problem, cluster=cluster)
    kinds = {}
    for index, device in enumerate(problem.cluster.devices):
        if device not in kinds:
            stage = Stage(nodes, (index,), problem.micro_batch_size)
            (cost,) = stage_costs(launched, Placement((stage,)))
            tasks = problem.micro_batches * (cost.forward_s + cost.backward_s)
            kinds[device] = IdealStep(tasks + cost.update_s, cost.update_s)
    return tuple(kinds[device] for device in problem.cluster.devices)


def _at_roofline(device: Device) -> Device:
    """The device with launches, and starts of tasks, that take no time. What was measured of operators stays."""
    tasks = None if device.tasks is None else replace(device.tasks, forward_s=0.0, backward_s=0.0, waiting_s=0.0)
    return replace(device, launch_latency_s=0.0, tasks=tasks)


def _copies(works: tuple[StageWork, ...]) -> Mapping[int, Mapping[int, float]]:
    """How often each node is computed for a sample, by pipeline."""
    found: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for work in works:
        for each in work.nodes:
            found[work.stage.pipeline][each.index] += len(work.stage.devices) * each.sharing.share
    return found


def _stage_parts(work: StageWork, copies: Mapping[int, float], forward_s: float) -> StageParts:
    problem = work.problem
    exchange = exchange_seconds(problem.graph, problem.cluster, work, differentiable_values(problem.graph))
    repeated = np.array([1 - 1 / max(1.0, copies[each.index]) for each in work.nodes])
    shares = np.array([each.sharing.share for each in work.nodes])
    nodes = [problem.work[each.index] for each in work.nodes]
    kinds = {problem.cluster.devices[device] for device in work.stage.devices}
    seconds = [node_seconds(nodes, device, problem.precision, shares) for device in kinds]
    ahead, back = (max(float((each[phase] * repeated).sum()) for each in seconds) for phase in (0, 1))
    again = forward_s if work.stage.recompute and problem.train else 0.0
    return StageParts(TaskParts(exchange.forward_s, 0.0, ahead), TaskParts(exchange.backward_s, again, back))
