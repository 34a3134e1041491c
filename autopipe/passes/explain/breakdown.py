"""How far a step is from the ideal, and what each second of the distance goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.placement import Placement
from autopipe.ir.plan import Breakdown
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.timeline import Prediction
from autopipe.passes.cost.parts import StageParts, TaskParts, alone, stage_parts
from autopipe.passes.schedule.simulate import simulate


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
