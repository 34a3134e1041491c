"""How far a step is from the ideal, and what each second of the distance goes to.

Breakdown of the seconds of a stage, besides work that one device would do as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.cluster import Device
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import Breakdown
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.timeline import Prediction
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import StageWork, exchange_seconds, stage_work
from autopipe.passes.cost.stages import stage_costs
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


def breakdown(
    problem: Problem, placement: Placement, schedule: Schedule, prediction: Prediction, step_s: float
) -> Breakdown:
    """Breakdown of a step of `step_s` seconds, as simulated from the prediction."""
    parts = stage_parts(problem, placement, prediction)
    own = _own_seconds(placement, schedule, prediction, parts)
    single = alone(problem)
    rate = sum(1 / each.step_s for each in single if each.step_s)
    ideal = 1 / rate if rate else 0.0
    weights = [ideal / each.step_s if each.step_s else 1 / len(single) for each in single]

    def average(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    busiest = max(each.total_s for each in own)
    silent = _step_seconds(placement, schedule, _silent(prediction)) if prediction.messages else step_s
    update = average(weight * each.update_s for weight, each in zip(weights, single, strict=True))
    return Breakdown(
        ideal_s=ideal,
        bubble_s=silent - busiest,
        imbalance_s=average(busiest - each.total_s for each in own),
        messages_s=step_s - silent,
        collectives_s=average(each.exchange_s for each in own),
        gradients_s=average(each.gradients_s for each in own),
        recomputation_s=average(each.recomputation_s for each in own),
        repetition_s=average(each.repetition_s for each in own),
        update_s=average(each.update_s for each in own) - update,
        launches_s=average(each.work_s for each in own) - (ideal - update),
    )


@dataclass(slots=True)
class _Own:
    """Seconds of a step in which a device does something, by what it does."""

    work_s: float = 0.0
    exchange_s: float = 0.0
    recomputation_s: float = 0.0
    repetition_s: float = 0.0
    gradients_s: float = 0.0
    update_s: float = 0.0

    @property
    def total_s(self) -> float:
        return (
            self.work_s + self.exchange_s + self.recomputation_s + self.repetition_s + self.gradients_s + self.update_s
        )


def _own_seconds(
    placement: Placement, schedule: Schedule, prediction: Prediction, parts: Sequence[StageParts]
) -> list[_Own]:
    """Seconds of each device by kind of work."""
    found = [_Own() for _ in range(schedule.devices)]
    counts = {id(order): Counter((task.stage, task.phase) for task in order) for order in _once(schedule)}
    for own, order in zip(found, schedule.tasks, strict=True):
        for (stage, phase), count in counts[id(order)].items():
            part = _parts_of(parts[stage], phase)
            own.exchange_s += count * part.exchange_s
            own.recomputation_s += count * part.recomputation_s
            own.repetition_s += count * part.repetition_s
            rest = part.exchange_s + part.recomputation_s + part.repetition_s
            own.work_s += count * (prediction.stages[stage].seconds(phase) - rest)
    for placed, predicted in zip(placement.stages, prediction.stages, strict=True):
        for device in placed.devices:
            found[device].gradients_s += predicted.gradient_s
            found[device].update_s += predicted.update_s
    return found


def _once(schedule: Schedule) -> Iterable[tuple[Task, ...]]:
    """The lists of tasks, those that devices share once."""
    return {id(order): order for order in schedule.tasks}.values()


def _parts_of(stage: StageParts, phase: Phase) -> TaskParts:
    match phase:
        case Phase.FORWARD:
            return stage.forward
        case Phase.BACKWARD | Phase.INPUT_GRADIENT:
            return stage.backward
        case Phase.WEIGHT_GRADIENT:
            return TaskParts()


def _step_seconds(placement: Placement, schedule: Schedule, prediction: Prediction) -> float:
    return simulate(schedule, tuple(stage.devices for stage in placement.stages), prediction).end


def _silent(prediction: Prediction) -> Prediction:
    """The same where messages take no time."""
    messages = tuple(
        replace(each, forward_bytes=0, backward_bytes=0, forward_s=0.0, backward_s=0.0) for each in prediction.messages
    )
    return replace(prediction, messages=messages)
