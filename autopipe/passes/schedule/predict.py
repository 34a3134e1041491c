"""Predict the times of a placement's stages by the cost model."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Task
from autopipe.ir.timeline import Prediction, StagePrediction
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.schedule.merge import Ticks
from autopipe.passes.schedule.messages import stage_messages


def predict(problem: Problem, placement: Placement) -> Prediction:
    """Seconds and bytes of every stage and every message."""
    return predicted(problem, placement, stage_costs(problem, placement))


def predicted(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> Prediction:
    """The same where it is known what the stages cost."""
    return Prediction(tuple(map(_stage, costs)), stage_messages(problem, placement))


def task_ticks(problem: Problem, placement: Placement) -> Ticks:
    """The length of each task by the cost model. Whole numbers, so that a steady state repeats exactly."""
    return ticks_of(_stages(problem, placement))


def ticks_of(stages: Sequence[StagePrediction]) -> Ticks:
    """The length of each task in nanoseconds, at least 1."""

    def ticks(task: Task) -> int:
        return max(1, round(stages[task.stage].seconds(task.phase) * 1e9))

    return ticks


def _stages(problem: Problem, placement: Placement) -> tuple[StagePrediction, ...]:
    return tuple(_stage(cost) for cost in stage_costs(problem, placement))


def _stage(cost: StageCost) -> StagePrediction:
    return StagePrediction(
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        input_gradient_s=cost.backward_s - cost.weight_gradient_s,
        weight_gradient_s=cost.weight_gradient_s,
        split_s=cost.split_s,
        gradient_s=cost.gradient_s,
        update_s=cost.update_s,
        parameter_bytes=cost.parameter_bytes,
        static_bytes=cost.static_bytes,
        kept_bytes=cost.kept_bytes,
        weight_kept_bytes=cost.weight_kept_bytes,
        transient_bytes=cost.transient_bytes,
    )
