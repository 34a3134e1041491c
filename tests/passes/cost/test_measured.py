"""Planning with measured costs: what was measured counts, what was not is judged by it, and
exchanges follow fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.measured_costs import (
    AffineTime,
    Costs,
    DeviceCosts,
    ExchangeCost,
    OperationCost,
    TaskCosts,
    TensorCosts,
    Timing,
)
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.communication import all_gather, all_reduce
from autopipe.passes.cost.measured import (
    Operations,
    cost_coverage,
    costed_work,
    measured_cluster,
    with_micro_batch_size,
)
from autopipe.passes.cost.roofline import node_seconds, roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.data_parallel import DataParallel
from tests.passes.cost.graphs import Builder, cluster, device, perceptron, problem
from tests.passes.cost.mixed import kind, mixed_cluster

GRAPH = perceptron([64, 48, 20])
"""MatMul, Relu, MatMul, Relu on 8 samples."""


def costs_of(graph: Graph, *times: float, degrees: tuple[int, ...] = (), **more: object) -> Costs:
    """Node i takes `times[i]` seconds forward and twice that backward; a share of 1/d of it 3/4 of
    that.
    """
    return Costs((DeviceCosts("toy", (), tuple(_costs(graph, times, degrees)), **more),))  # type: ignore[arg-type]


def _costs(
    graph: Graph, times: tuple[float, ...], degrees: tuple[int, ...]
) -> Iterator[OperationCost]:
    operations = Operations(graph, "fp32")
    work = roofline_costs(graph)
    for index, seconds in enumerate(times):
        for splits in ((), *operations.measurable_splits(index, degrees)):
            spent = seconds * (0.75 if splits else 1.0)
            sample = operations.sample(index, work[index], splits)
            yield sample.cost(Timing(spent, 0.0, 5), Timing(2 * spent, 0.0, 5))


def measured_problem(graph: Graph, costs: Costs, devices: Cluster | None = None) -> Problem:
    machines = measured_cluster(devices or cluster(2), costs)
    return replace(
        problem(graph, machines),
        work=costed_work(graph, "fp32", machines, costs),
        costs=costs,
        batch_size=32,
    )


def test_measured_nodes_take_what_was_measured() -> None:
    given = measured_problem(GRAPH, costs_of(GRAPH, 1.0, 2.0, 3.0, 4.0))
    forward, backward = node_seconds(given.work, given.cluster.devices[0], "fp32")
    np.testing.assert_allclose(forward, [1, 2, 3, 4])
    np.testing.assert_allclose(backward, [2, 4, 6, 8])
    found = cost_coverage(given)
    assert found is not None
    assert (found.measured, found.extrapolated) == (4, 0)
    assert cost_coverage(problem(GRAPH, cluster(2))) is None


def test_shares_take_what_was_measured_of_them() -> None:
    given = measured_problem(GRAPH, costs_of(GRAPH, 1.0, 1.0, 1.0, 1.0, degrees=(2,)))
    forward, _ = node_seconds(given.work, given.cluster.devices[0], "fp32", 0.5)
    np.testing.assert_allclose(forward, 0.75)
    between, _ = node_seconds(given.work, given.cluster.devices[0], "fp32", 0.75)
    np.testing.assert_allclose(between, 0.875)
    below, _ = node_seconds(given.work, given.cluster.devices[0], "fp32", 0.25)
    assert np.all((below > 0) & (below < 0.75))


def test_other_micro_batches_are_looked_up_by_their_shapes() -> None:
    half = costs_of(with_micro_batch_size(problem(GRAPH, cluster(2)), 4).graph, 7.0, 7.0, 7.0, 7.0)
    given = with_micro_batch_size(measured_problem(GRAPH, half), 4)
    forward, _ = node_seconds(given.work, given.cluster.devices[0], "fp32")
    np.testing.assert_allclose(forward, 7.0)
    found = cost_coverage(given)
    assert found is not None
    assert found.measured == 4


def test_what_was_not_measured_is_judged_by_what_was() -> None:
    """The second MatMul by the first one's ratio to the roofline, the Relus by all there is."""
    roofline, _ = node_seconds(roofline_costs(GRAPH), device(), "fp32")
    ratio = 1.0 / roofline[0]
    given = measured_problem(GRAPH, costs_of(GRAPH, 1.0))
    forward, _ = node_seconds(given.work, given.cluster.devices[0], "fp32")
    np.testing.assert_allclose(forward, [1.0, *(roofline[1:] * ratio)])
    found = cost_coverage(given)
    assert found is not None
    assert (found.measured, found.extrapolated) == (1, 3)


def test_a_file_of_inference_judges_backward() -> None:
    (own,) = costs_of(GRAPH, 1.0, 1.0, 1.0, 1.0).devices
    forward_only = replace(
        own, operations=tuple(replace(each, backward=None) for each in own.operations)
    )
    given = measured_problem(GRAPH, Costs((forward_only,)))
    forward, backward = node_seconds(given.work, given.cluster.devices[0], "fp32")
    np.testing.assert_allclose(forward, 1.0)
    np.testing.assert_allclose(backward, node_seconds(roofline_costs(GRAPH), device(), "fp32")[1])


def test_a_bias_is_a_part_of_its_product() -> None:
    builder = Builder(8, 16)
    product = builder.linear("x", 32)
    graph = builder.finish(builder.add(product, builder.parameter("bias", (32,))))
    operations = Operations(graph, "fp32")
    assert operations.absorbed == {1}
    assert operations.operation(0).operator == "MatMul+Add"
    assert operations.operation(0).operands == ("float32[8,16]", "float32[16,32]", "float32[32]")
    assert operations.operation(0).gradients == (1, 2)
    assert operations.operation(0, (Split("n", 2),)).operands[-1] == "float32[16]"
    assert operations.operation(0, (Split("k", 2),)).operator == "MatMul", (
        "partial sums have no bias"
    )
    given = measured_problem(graph, costs_of(graph, 5.0))
    forward, _ = node_seconds(given.work, given.cluster.devices[0], "fp32")
    np.testing.assert_allclose(forward, [5.0, 0.0])
    judged = measured_problem(graph, costs_of(GRAPH, 1.0))
    found = cost_coverage(judged)
    assert found is not None
    assert (found.measured, found.extrapolated) == (0, 2)
    forward, _ = node_seconds(judged.work, judged.cluster.devices[0], "fp32")
    assert forward[1] == 0.0


TENSORS = TensorCosts(1.0, 0.5)
TASKS = TaskCosts(10.0, 20.0, 3.0, 30.0, TENSORS, TENSORS, (TENSORS, TENSORS, TENSORS))


def test_tasks_and_updates_take_what_was_measured() -> None:
    given = measured_problem(GRAPH, costs_of(GRAPH, 1.0, 1.0, 1.0, 1.0, tasks=TASKS))
    placement = Placement((Stage((0, 1, 2, 3), (0,), 8),))
    (cost,) = stage_costs(given, placement)
    size = 4 * (64 * 48 + 48 * 20)
    assert cost.forward_s == pytest.approx(10 + 4)
    assert cost.backward_s == pytest.approx(20 + 8 + 0.75 * (2 * 1.0 + 0.5 * size))
    assert cost.update_s == pytest.approx(30 + 2 * 1.0 + 0.5 * size)
    assert cost.split_s == pytest.approx(3 * 2), "two products"


@pytest.mark.parametrize("shard", [False, True])
def test_gradients_go_into_buckets_where_several_devices_add_them_up(shard: bool) -> None:
    kinds = ("reduce_scatter", "all_gather") if shard else ("all_reduce",)
    exchanges = tuple(ExchangeCost(kind, 2, AffineTime(100.0, 0.25), ()) for kind in kinds)
    tasks = replace(TASKS, bucket=TensorCosts(7.0, 2.0))
    given = measured_problem(
        GRAPH, costs_of(GRAPH, 1.0, 1.0, 1.0, 1.0, tasks=tasks, exchanges=exchanges)
    )
    given = replace(given, optimizer=replace(given.optimizer, shard=shard))
    alone, both = (
        stage_costs(given, Placement((Stage((0, 1, 2, 3), devices, 8),)))
        for devices in ((0,), (0, 1))
    )
    size = 4 * (64 * 48 + 48 * 20)
    assert alone[0].gradient_s == 0.0
    assert both[0].gradient_s == pytest.approx(
        7.0 * 2 + 2.0 * size + len(kinds) * (100.0 + 0.25 * size)
    )


def test_exchanges_take_what_was_measured() -> None:
    fits = {
        "send": AffineTime(1.0, 0.25),
        "all_reduce": AffineTime(2.0, 0.5),
        "reduce_scatter": AffineTime(5.0, 0.5),
    }
    exchanges = tuple(ExchangeCost(kind, 2, fit, ()) for kind, fit in fits.items())
    machines = measured_cluster(cluster(8, per_node=4), costs_of(GRAPH, 1.0, exchanges=exchanges))
    assert machines.link(0, 1).seconds(100) == pytest.approx(26)
    assert machines.link(0, 4) == cluster(8, per_node=4).link(0, 4), "between nodes"
    assert all_reduce(machines, (0, 1)).seconds(100) == pytest.approx(52)
    assert all_reduce(machines, (0, 1)).seconds(0) == 0
    assert all_gather(machines, (0, 1)).seconds(100) == pytest.approx(1 + 0.25 * 50), (
        "by the link where not measured"
    )
    assert all_reduce(machines, (0, 4)).seconds(100) < 1, "between nodes"


def test_a_plan_follows_what_was_measured() -> None:
    """Where shares take as long as the whole, and exchanges long, replicas gain nothing."""
    slow = costs_of(
        GRAPH,
        1.0,
        1.0,
        1.0,
        1.0,
        exchanges=(ExchangeCost("all_reduce", 2, AffineTime(100.0, 0.0), ()),),
    )
    given = measured_problem(GRAPH, slow)
    placement = DataParallel().run(given)
    (cost,) = stage_costs(given, placement)
    (unmeasured,) = stage_costs(problem(GRAPH, cluster(2)), placement)
    assert cost.gradient_s == pytest.approx(100.0)
    assert cost.forward_s > 1000 * unmeasured.forward_s


def test_each_kind_of_a_mixed_cluster_takes_what_was_measured_of_it() -> None:
    fast, slow = (kind(1.0, name=name) for name in ("fast", "slow"))
    both = mixed_cluster([(2, fast), (2, slow)])
    sends = [ExchangeCost("send", 2, AffineTime(1.0, seconds), ()) for seconds in (0.5, 0.25)]
    devices = [
        replace(costs_of(GRAPH, *times).devices[0], device=each.name, exchanges=(sent,))
        for each, times, sent in zip((fast, slow), ((1.0, 2.0), (3.0, 5.0)), sends, strict=True)
    ]
    given = measured_problem(GRAPH, Costs(tuple(devices)), both)
    seconds = [float(node_seconds(given.work, each, "fp32")[0][0]) for each in given.cluster.kinds]
    assert seconds == [1.0, 3.0]
    found = measured_cluster(both, Costs(tuple(devices)))
    rates = [found.link(*pair).bandwidth_bytes_per_s for pair in ((0, 1), (2, 3), (1, 2))]
    assert rates == [2.0, 4.0, both.levels[0].link.bandwidth_bytes_per_s]
    with pytest.raises(ConfigurationError, match="the measured costs lack device 'slow'"):
        measured_problem(GRAPH, Costs((devices[0],)), both)


def test_devices_are_found_by_name_where_there_are_several() -> None:
    own = costs_of(GRAPH, 1.0, 1.0, 1.0, 1.0).devices[0]
    other = replace(own, device="other", operations=())
    forward, _ = node_seconds(measured_problem(GRAPH, Costs((other, own))).work, device(), "fp32")
    np.testing.assert_allclose(forward, 1.0)
    with pytest.raises(ConfigurationError, match="the measured costs lack device 'toy'"):
        measured_problem(GRAPH, Costs((other, replace(other, device="third"))))
