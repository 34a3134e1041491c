"""Task lengths as whole nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Task
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.schedule.merge import Ticks


def task_ticks(problem: Problem, placement: Placement) -> Ticks:
    """The length of each task by the cost model. Whole numbers, so that a steady state repeats exactly."""
    return ticks_of(stage_costs(problem, placement))


def ticks_of(costs: Sequence[StageCost]) -> Ticks:
    """The length of each task in nanoseconds, at least 1."""

    def ticks(task: Task) -> int:
        return max(1, round(task_seconds(costs, task) * 1e9))

    return ticks


def task_seconds(costs: Sequence[StageCost], task: Task) -> float:
    """The length of a task in seconds."""
    cost = costs[task.stage]
    return cost.forward_s if task.phase is Phase.FORWARD else cost.backward_s
