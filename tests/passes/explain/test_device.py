"""What a device does: all of its step, and whom it waits for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.explain import device_report
from autopipe.passes.registry import scheduler_class
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.explain.plans import plans


@settings(max_examples=40)
@given(plans())
def test_what_devices_do_and_wait_for_is_all_of_the_step(
    plan: tuple[Problem, Placement, str],
) -> None:
    given_problem, placement, schedule = plan
    prediction = predict(given_problem, placement)
    order = scheduler_class(schedule)().run(given_problem, placement)
    timeline = simulate(order, tuple(stage.devices for stage in placement.stages), prediction)
    for device in range(given_problem.cluster.size):
        report = device_report(placement, prediction, timeline, device)
        waited = sum(seconds for _, seconds in report.waits) + report.messages_s + report.end_s
        assert report.busy_s + waited == pytest.approx(timeline.end)
        assert report.end_s > -1e-12
        assert device not in {other for other, _ in report.waits}, "nobody waits for itself"


def test_the_last_stage_waits_for_the_first_and_for_its_message() -> None:
    given_problem = problem(perceptron([16, 32, 4]), cluster(2), micro_batches=1)
    placement = Placement((Stage((0, 1), (0,), 8), Stage((2, 3), (1,), 8)))
    prediction = predict(given_problem, placement)
    order = scheduler_class("1f1b")().run(given_problem, placement)
    timeline = simulate(order, ((0,), (1,)), prediction)
    report = device_report(placement, prediction, timeline, 1)
    assert dict(report.waits) == pytest.approx({0: prediction.stages[0].forward_s})
    assert report.messages_s == pytest.approx(prediction.messages[0].forward_s)
