"""The host's time: operators are counted as programs have them, and a task takes the longer of
device and host.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Phase
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.fusion import fused_work
from autopipe.passes.cost.roofline import StepSeconds, roofline_costs
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.registry import scheduler_class
from autopipe.passes.schedule.limits import lower_bound
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem
from tests.passes.explain.plans import plans

LAUNCH_S = 1e-3
"""Much longer than any node of these graphs takes a device."""


def one_stage(costed: Problem, recompute: bool = False) -> StageCost:
    """Return the cost of all nodes as one stage on the first device."""
    nodes = tuple(range(len(costed.graph.nodes)))
    (cost,) = stage_costs(
        costed, Placement((Stage(nodes, (0,), costed.micro_batch_size, recompute=recompute),))
    )
    return cost


def biased() -> Graph:
    """Return x · w + b as rows of another shape: a product, the addition of its bias, and a
    view.
    """
    builder = Builder(8, 16)
    product = builder.linear("x", 4)
    added = builder.add(product, builder.parameter("bias", (4,)))
    return builder.finish(builder.node("Flatten", (added,), (8, 4), axis=1))


def test_a_bias_counts_with_its_product_and_a_view_counts() -> None:
    work = roofline_costs(biased())
    assert [each.operators for each in work] == [1, 0, 1]
    assert [each.backward_operators for each in work] == [2, 0, 2]


def test_what_no_gradient_flows_through_has_no_backward_operators() -> None:
    builder = Builder(8, 16)
    frozen = builder.relu(builder.linear("x", 16, trainable=False))
    work = roofline_costs(builder.finish(builder.linear(frozen, 4)))
    assert [each.operators for each in work] == [1, 1, 1]
    assert [each.backward_operators for each in work] == [0, 0, 2]


def test_nodes_of_one_compiled_kernel_are_one_operator() -> None:
    builder = Builder(8, 16)
    graph = builder.finish(builder.relu(builder.relu(builder.linear("x", 16))))
    work = fused_work(graph, "fp32", roofline_costs(graph))
    assert sum(each.operators for each in work) == 2, "the product, and both activations together"
    assert sum(each.backward_operators for each in work) == 4


def test_a_stage_takes_the_hosts_time_where_it_is_longer() -> None:
    """Two products and two activations: four operators forward, eight backward."""
    graph = perceptron([16, 32, 4])
    bound = one_stage(problem(graph, cluster(1, host_launch=LAUNCH_S)))
    assert bound.forward_s == pytest.approx(4 * LAUNCH_S)
    assert bound.backward_s == pytest.approx(8 * LAUNCH_S)
    assert bound.host_bound
    again = one_stage(problem(graph, cluster(1, host_launch=LAUNCH_S)), recompute=True)
    assert again.backward_s == pytest.approx(12 * LAUNCH_S), "the forward is started again"
    inferring = one_stage(problem(graph, cluster(1, host_launch=LAUNCH_S), mode=Mode.INFER))
    assert (inferring.forward_s, inferring.backward_s) == (pytest.approx(4 * LAUNCH_S), 0)


def test_a_stage_takes_the_devices_time_where_that_is_longer() -> None:
    graph = perceptron([16, 32, 4])
    without = one_stage(problem(graph, cluster(1)))
    fast = one_stage(problem(graph, cluster(1, host_launch=1e-12)))
    assert not fast.host_bound and not without.host_bound
    assert without.on_host is None
    for phase in Phase:
        assert fast.host_wait_s(phase) == 0
        assert fast.seconds(phase) == without.seconds(phase)
    assert replace(fast, on_host=None, on_device=None) == without


def test_halves_of_a_backward_share_its_operators() -> None:
    """Of a product's two operators in backward one computes the weight's gradient, of the first
    product's both: its other factor is the model's input.
    """
    bound = one_stage(problem(perceptron([16, 32, 4]), cluster(1, host_launch=LAUNCH_S)))
    assert bound.weight_gradient_s == pytest.approx(3 * LAUNCH_S)
    assert bound.input_gradient_s == pytest.approx(5 * LAUNCH_S)


def test_a_split_node_costs_each_host_a_whole_operator() -> None:
    graph = perceptron([16, 32, 4])
    shared_problem = problem(graph, cluster(4, host_launch=LAUNCH_S))
    nodes = tuple(range(len(graph.nodes)))
    (shared,) = stage_costs(
        shared_problem,
        Placement((Stage(nodes, (0, 1, 2, 3), 8, sample_axes(graph).splits(nodes, 4)),)),
    )
    assert shared.forward_s == pytest.approx(4 * LAUNCH_S)


@given(plans())
def test_no_bound_exceeds_the_cost(plan: tuple[Problem, Placement, str]) -> None:
    """What searches count by nodes, of the device alone, is never more than the finished stage
    takes.
    """
    drawn, placement, _ = plan
    for stage, cost in zip(placement.stages, stage_costs(drawn, placement), strict=True):
        parts = len(stage.devices)
        least = StepSeconds(drawn).of(drawn.cluster.device_types_among(stage.devices), parts)
        assert least[list(stage.nodes)].sum() <= (cost.forward_s + cost.backward_s) * (1 + 1e-9)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            if cost.on_host is not None and drawn.train:
                assert cost.seconds(phase) >= cost.on_host.of(phase) * (1 - 1e-9)


@settings(max_examples=30)
@given(plans())
def test_no_schedule_is_shorter_than_its_bound(plan: tuple[Problem, Placement, str]) -> None:
    drawn, placement, schedule = plan
    prediction = predict(drawn, placement)
    found = scheduler_class(schedule)().run(drawn, placement)
    step_s = simulate(found, tuple(stage.devices for stage in placement.stages), prediction).end
    assert lower_bound(drawn, placement, prediction) <= step_s * (1 + 1e-9)
