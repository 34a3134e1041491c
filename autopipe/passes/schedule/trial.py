"""A step of a placement, as it is simulated."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.passes.cost.stages import StageCost, step_seconds
from autopipe.passes.schedule.chain import Step, chain_step, is_chain
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.named.kfkb import order_kfkb
from autopipe.passes.schedule.predict import predicted, ticks_of
from autopipe.passes.schedule.simulate import simulate


def busy_s(costs: Sequence[StageCost], micro_batches: int) -> float:
    """Seconds that the busiest stage takes of a step: the step is no shorter."""
    return max(step_seconds(cost, micro_batches) for cost in costs)


def step_s(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> float:
    """Seconds of a step under 1F1B with stages of such costs, whatever memory says."""
    return _step(problem, placement, costs).end


def quick_step_seconds(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> float:
    """The same. Raises InfeasibleError where memory does not hold the placement."""
    step = _step(problem, placement, costs)
    check_memory(problem, placement, step)
    return step.end


def _step(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> Timeline | Step:
    graph, prediction = StageGraph.of(problem, placement), predicted(problem, placement, costs)
    if is_chain(graph, prediction):
        return chain_step(graph, prediction, problem.micro_batches, problem.train)
    ks = (1,) * len(placement.stages)
    schedule = order_kfkb(graph, problem.micro_batches, ks, problem.train, ticks_of(prediction.stages))
    return simulate(schedule, graph.stage_devices, prediction)
