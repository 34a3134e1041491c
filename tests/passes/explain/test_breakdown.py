"""The parts of a step: they add up to it, whatever the plan, and each is what it says."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import Breakdown
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.communication import all_reduce
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.registry import scheduler_class
from autopipe.passes.schedule.breakdown import breakdown
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.explain.plans import plans


def broken_down(
    given: Problem, placement: Placement, schedule: str = "1f1b"
) -> tuple[Breakdown, float]:
    """The breakdown of a placement's step under a schedule, and the step."""
    prediction = predict(given, placement)
    found = scheduler_class(schedule)().run(given, placement)
    step_s = simulate(found, tuple(stage.devices for stage in placement.stages), prediction).end
    return breakdown(given, placement, found, prediction, step_s), step_s


@settings(max_examples=60)
@given(plans())
def test_parts_add_up_to_the_step(plan: tuple[Problem, Placement, str]) -> None:
    found, step_s = broken_down(*plan)
    assert found.step_s == pytest.approx(step_s, rel=1e-12)
    assert sum(seconds for _, seconds in found.losses) == pytest.approx(
        step_s - found.ideal_s, rel=1e-9, abs=1e-15
    )
    mixed = len(set(plan[0].cluster.devices)) > 1
    for name, seconds in found.losses:
        assert seconds > -1e-9 * step_s or (mixed and name == "launch overhead"), name


def test_one_device_loses_nothing_but_launches() -> None:
    graph = perceptron([16, 32, 4])
    given = problem(graph, cluster(1))
    found, _ = broken_down(given, Placement((Stage(tuple(range(len(graph.nodes))), (0,), 8),)))
    assert {name for name, seconds in found.losses if seconds > 1e-15} == {
        "launch overhead",
        "update",
    }
    launch = given.cluster.devices[0].launch_latency_s
    forward, backward = node_seconds(given.work, given.cluster.devices[0], "fp32")
    free = replace(given.cluster.devices[0], launch_latency_s=0.0)
    at_roofline = node_seconds(given.work, free, "fp32")
    both = sum(forward) + sum(backward) - sum(at_roofline[0]) - sum(at_roofline[1])
    assert found.launch_overhead_s == pytest.approx(given.micro_batches * both)
    assert found.update_s == pytest.approx(launch)


def test_replicas_repeat_updates_and_sum_gradients() -> None:
    graph = perceptron([16, 32, 4])
    given = problem(graph, cluster(4))
    nodes = tuple(range(len(graph.nodes)))
    shared = Stage(nodes, (0, 1, 2, 3), 8, sample_axes(graph).splits(nodes, 4))
    found, _ = broken_down(given, Placement((shared,)))
    size = 4 * (16 * 32 + 32 * 4)
    assert found.gradients_s == pytest.approx(all_reduce(given.cluster, range(4)).seconds(size))
    assert (
        found.bubble_s
        == found.imbalance_s
        == found.exposed_p2p_s
        == found.collectives_s
        == found.redundant_compute_s
        == 0
    )
    assert found.update_s > 0
    whole, _ = broken_down(given, Placement((replace(shared, splits=()),)))
    assert whole.redundant_compute_s > 2 * whole.ideal_s, (
        "four devices do the same: three of them for nothing"
    )
    assert whole.ideal_s == pytest.approx(found.ideal_s)


def test_recomputation_is_a_forward_for_each_micro_batch() -> None:
    graph = perceptron([16, 32, 4])
    given = problem(graph, cluster(2))
    stages = tuple(
        Stage(nodes, (device,), 8, recompute=True)
        for device, nodes in enumerate(((0, 1), tuple(range(2, len(graph.nodes)))))
    )
    found, _ = broken_down(given, Placement(stages))
    prediction = predict(given, Placement(stages))
    forwards = sum(stage.forward_s for stage in prediction.stages)
    assert found.recomputation_s == pytest.approx(given.micro_batches * forwards / 2)
    without, _ = broken_down(
        given, Placement(tuple(dataclasses.replace(each, recompute=False) for each in stages))
    )
    assert without.recomputation_s == 0
    assert without.ideal_s == pytest.approx(found.ideal_s)
