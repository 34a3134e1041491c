"""The host's time: operators are counted as programs have them, and a task takes the longer of device and host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Phase
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.fusion import fused
from autopipe.passes.cost.roofline import annotate
from autopipe.passes.cost.stages import StageCost, stage_costs
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem

LAUNCH_S = 1e-3
"""Much longer than any node of these graphs takes a device."""


def hosted(devices: Cluster, launch_s: float = LAUNCH_S) -> Cluster:
    """Return the cluster with hosts that take `launch_s` seconds per operator."""
    return replace(devices, devices=tuple(replace(each, host_launch_s=launch_s) for each in devices.devices))


def one_stage(given: Problem, recompute: bool = False) -> StageCost:
    """Return the cost of all nodes as one stage on the first device."""
    nodes = tuple(range(len(given.graph.nodes)))
    (cost,) = stage_costs(given, Placement((Stage(nodes, (0,), given.micro_batch_size, recompute=recompute),)))
    return cost


def biased() -> Graph:
    """Return x · w + b as rows of another shape: a product, the addition of its bias, and a view."""
    builder = Builder(8, 16)
    product = builder.linear("x", 4)
    added = builder.add(product, builder.parameter("bias", (4,)))
    return builder.finish(builder.node("Flatten", (added,), (8, 4), axis=1))


def test_a_bias_counts_with_its_product_and_a_view_counts() -> None:
    work = annotate(biased())
    assert [each.operators for each in work] == [1, 0, 1]
    assert [each.backward_operators for each in work] == [2, 0, 2]


def test_what_no_gradient_flows_through_has_no_backward_operators() -> None:
    builder = Builder(8, 16)
    frozen = builder.relu(builder.linear("x", 16, trainable=False))
    work = annotate(builder.finish(builder.linear(frozen, 4)))
    assert [each.operators for each in work] == [1, 1, 1]
    assert [each.backward_operators for each in work] == [0, 0, 2]


def test_nodes_of_one_compiled_kernel_are_one_operator() -> None:
    builder = Builder(8, 16)
    graph = builder.finish(builder.relu(builder.relu(builder.linear("x", 16))))
    work = fused(graph, "fp32", annotate(graph))
    assert sum(each.operators for each in work) == 2, "the product, and both activations together"
    assert sum(each.backward_operators for each in work) == 4


def test_a_stage_takes_the_hosts_time_where_it_is_longer() -> None:
    """Two products and two activations: four operators forward, eight backward."""
    graph = perceptron([16, 32, 4])
    bound = one_stage(problem(graph, hosted(cluster(1))))
    assert bound.forward_s == pytest.approx(4 * LAUNCH_S)
    assert bound.backward_s == pytest.approx(8 * LAUNCH_S)
    assert bound.host_bound
    again = one_stage(problem(graph, hosted(cluster(1))), recompute=True)
    assert again.backward_s == pytest.approx(12 * LAUNCH_S), "the forward is started again"
    inferring = one_stage(problem(graph, hosted(cluster(1)), mode=Mode.INFER))
    assert (inferring.forward_s, inferring.backward_s) == (pytest.approx(4 * LAUNCH_S), 0)


def test_a_stage_takes_the_devices_time_where_that_is_longer() -> None:
    graph = perceptron([16, 32, 4])
    without, fast = one_stage(problem(graph, cluster(1))), one_stage(problem(graph, hosted(cluster(1), 1e-12)))
    assert not fast.host_bound and not without.host_bound
    assert without.on_host is None
    for phase in Phase:
        assert fast.host_wait_s(phase) == 0
        assert fast.seconds(phase) == without.seconds(phase)
    assert replace(fast, on_host=None, on_device=None) == without


def test_halves_of_a_backward_share_its_operators() -> None:
    """Of a product's two operators in backward one computes the weight's gradient, of the first product's both: its
    other factor is the model's input."""
    bound = one_stage(problem(perceptron([16, 32, 4]), hosted(cluster(1))))
    assert bound.weight_gradient_s == pytest.approx(3 * LAUNCH_S)
    assert bound.input_gradient_s == pytest.approx(5 * LAUNCH_S)


def test_a_split_node_costs_each_host_a_whole_operator() -> None:
    graph = perceptron([16, 32, 4])
    given = problem(graph, hosted(cluster(4)))
    nodes = tuple(range(len(graph.nodes)))
    (shared,) = stage_costs(given, Placement((Stage(nodes, (0, 1, 2, 3), 8, sample_axes(graph).splits(nodes, 4)),)))
    assert shared.forward_s == pytest.approx(4 * LAUNCH_S)
