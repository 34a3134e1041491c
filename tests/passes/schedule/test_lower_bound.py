"""Lower bounds with fewer micro-batches than pipelines, and with halves of a backward that together
take longer than the unsplit backward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.schedule.limits import lower_bound, min_time_after_tasks
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from autopipe.passes.schedule.simulate import simulate
from tests.passes.cost.graphs import cluster, perceptron, problem


def problem_with(count: int) -> Problem:
    graph = perceptron([64] * 9)
    return replace(problem(graph, cluster(4)), batch_size=8 * count, micro_batches=count)


def work_s(posed: Problem, placement: Placement) -> float:
    """Return the lower bound of a step without gradient sums and update."""
    prediction = predict(posed, placement)
    end_s = min_time_after_tasks(StageGraph.of(posed, placement), prediction)
    return lower_bound(posed, placement, prediction) - end_s


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_step_of_two_pipelines_is_below_the_bound(count: int) -> None:
    posed = problem_with(count)
    placement = TesselShapes("x").run(posed)
    prediction = predict(posed, placement)
    schedule = KForwardsKBackwards().run(posed, placement)
    step_s = simulate(schedule, StageGraph.of(posed, placement).stage_devices, prediction).end
    assert 0.5 * step_s < lower_bound(posed, placement, prediction) <= step_s * (1 + 1e-9)


def test_one_micro_batch_only_runs_on_the_first_pipeline() -> None:
    posed = problem_with(1)
    both = TesselShapes("x").run(posed)
    first = Placement(tuple(stage for stage in both.stages if stage.pipeline == 0))
    assert work_s(posed, both) == pytest.approx(work_s(posed, first), rel=1e-9)
    assert work_s(posed, both) > 0


def test_halves_that_wait_for_the_host_do_not_raise_the_bound() -> None:
    """Each half waits, so that both take 1.3 s together; an unsplit backward takes 1 s."""
    posed = problem_with(4)
    placement = Placement((Stage(tuple(range(len(posed.graph.nodes))), (0,), 8),))
    predicted = predict(posed, placement)
    (stage,) = predicted.stages
    waiting = replace(stage, backward_s=1.0, input_gradient_s=0.6, weight_gradient_s=0.7)
    prediction = replace(predicted, stages=(waiting,))
    schedule = KForwardsKBackwards().run(posed, placement)
    step_s = simulate(schedule, ((0,),), prediction).end
    assert lower_bound(posed, placement, prediction) == pytest.approx(step_s)
