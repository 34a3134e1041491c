from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Mode, Optimizer
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.communication import all_gather, all_reduce, reduce_scatter
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.memory_check import (
    device_memory,
    micro_batches_in_flight,
    with_required_recomputation,
)
from autopipe.passes.cost.roofline import accumulate_seconds, node_seconds, update_seconds
from autopipe.passes.cost.stages import stage_costs
from tests.passes.cost.graphs import Builder, cluster, edge_bytes, perceptron, problem

ADAM = Optimizer("adamw")


def cut(
    graph: Graph, at: list[int], groups: list[tuple[int, ...]], recompute: bool = False
) -> Placement:
    """Stages of consecutive nodes, starting at `at`, samples shared by each one's group."""
    bounds = [*at, len(graph.nodes)]
    axes = sample_axes(graph)
    return Placement(
        tuple(
            Stage(
                tuple(nodes := range(low, high)),
                group,
                8,
                axes.splits(nodes, len(group)),
                recompute,
            )
            for low, high, group in zip(bounds, bounds[1:], groups, strict=False)
        )
    )


def tied() -> Graph:
    """x · w, twice: the same square weight in both products."""
    builder = Builder(8, 16)
    weight = builder.parameter("w", (16, 16))
    return builder.finish(builder.matmul(builder.relu(builder.matmul("x", weight)), weight))


def test_a_stage_takes_the_time_of_its_nodes() -> None:
    graph = perceptron([16, 32, 4])
    given = problem(graph, cluster(2))
    first, second = stage_costs(given, cut(graph, [0, 2], [(0,), (1,)]))
    forward, backward = node_seconds(given.work, given.cluster.devices[0], "fp32")
    assert first.forward_s == pytest.approx(forward[:2].sum())
    added = 3 / 4 * accumulate_seconds(given.cluster.devices[0], 4 * 32 * 4)
    assert second.backward_s == pytest.approx(backward[2:].sum() + added), (
        "three of four micro-batches add gradients"
    )
    assert first.gradient_s == second.gradient_s == 0.0


def test_state_is_parameters_gradients_and_two_moments() -> None:
    graph = perceptron([16, 32, 4])
    (cost,) = stage_costs(problem(graph, cluster(1), optimizer=ADAM), cut(graph, [0], [(0,)]))
    size = 4 * (16 * 32 + 32 * 4)
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes) == (
        size,
        size,
        2 * size,
    )
    (inferring,) = stage_costs(problem(graph, cluster(1), mode=Mode.INFER), cut(graph, [0], [(0,)]))
    assert (inferring.parameter_bytes, inferring.gradient_bytes, inferring.optimizer_bytes) == (
        size,
        0,
        0,
    )
    assert inferring.kept_bytes == inferring.backward_s == 0
    assert inferring.transient_bytes == 4 * 8 * (32 + 32), "a product's result and its relu's"


def test_replicas_share_samples_and_sum_gradients() -> None:
    graph = perceptron([16, 32, 4])
    given = problem(graph, cluster(4))
    (alone,) = stage_costs(given, cut(graph, [0], [(0,)]))
    (shared,) = stage_costs(given, cut(graph, [0], [(0, 1, 2, 3)]))
    assert shared.kept_bytes == alone.kept_bytes / 4
    assert shared.parameter_bytes == alone.parameter_bytes
    assert shared.gradient_s == all_reduce(given.cluster, range(4)).seconds(alone.parameter_bytes)


def test_the_optimizers_state_is_shared_out_over_replicas() -> None:
    """Two stages of two replicas, AdamW: a half of two moments each, and as much less to update."""
    graph = perceptron([16, 32, 4])
    whole, shared = (
        problem(graph, cluster(4), optimizer=replace(ADAM, shard=shard)) for shard in (False, True)
    )
    placement = cut(graph, [0, 2], [(0, 1), (2, 3)])
    for before, after, size in zip(
        stage_costs(whole, placement),
        stage_costs(shared, placement),
        (4 * 16 * 32, 4 * 32 * 4),
        strict=True,
    ):
        assert (before.optimizer_bytes, after.optimizer_bytes) == (2 * size, size)
        assert after.gradient_bytes == after.parameter_bytes == size, (
            "gradients and parameters stay whole"
        )
        halves = (
            reduce_scatter(shared.cluster, (0, 1)).seconds(size),
            all_gather(shared.cluster, (0, 1)).seconds(size),
        )
        assert after.gradient_s == pytest.approx(sum(halves))
        assert after.update_s == update_seconds(shared.cluster.devices[0], size / 2, 2)
    assert static_memory(shared, placement) == (3 * 4 * 16 * 32,) * 2 + (3 * 4 * 32 * 4,) * 2
    alone = cut(graph, [0, 2], [(0,), (1,)])
    assert stage_costs(whole, alone) == stage_costs(shared, alone), "who has no copies keeps all"


def test_shares_of_what_stages_have_in_common_and_of_parts() -> None:
    graph = tied()
    given = problem(graph, cluster(3), optimizer=replace(ADAM, shard=True))
    size = 4 * 16 * 16
    costs = stage_costs(given, cut(graph, [0, 2], [(0, 1), (2,)]))
    kept = 2 * 4 * 86
    assert [cost.optimizer_bytes for cost in costs] == [kept, kept], "a third of 256 numbers, twice"
    builder = Builder(8, 16)
    line = problem(
        builder.finish(builder.linear("x", 32)), cluster(4), optimizer=replace(ADAM, shard=True)
    )
    columns = Placement((Stage((0,), (0, 1, 2, 3), 8, ((0, (Split("n", 2), Split("b", 2))),)),))
    (cost,) = stage_costs(line, columns)
    assert cost.parameter_bytes == size and cost.optimizer_bytes == size, "a half of a half, twice"


def test_a_tied_parameter_is_summed_over_the_devices_of_all_its_stages() -> None:
    graph = tied()
    given = problem(graph, cluster(3))
    costs = stage_costs(given, cut(graph, [0, 2], [(0, 1), (2,)]))
    expected = all_reduce(given.cluster, range(3)).seconds(4 * 16 * 16)
    assert [cost.gradient_s for cost in costs] == [expected, expected]


def test_two_stages_of_one_device_hold_a_tied_parameter_once() -> None:
    graph = tied()
    given = problem(graph, cluster(2), optimizer=ADAM)
    size = 4 * 16 * 16 * 4
    assert static_memory(given, cut(graph, [0, 1, 2], [(0,), (1,), (0,)])) == (size, 0)
    assert static_memory(given, cut(graph, [0, 2], [(0,), (1,)])) == (size, size)
    costs = stage_costs(given, cut(graph, [0, 1, 2], [(0,), (1,), (0,)]))
    assert [cost.static_bytes - cost.buffer_bytes for cost in costs] == [size, 0, 0]
    assert costs[0].update_s > 0
    assert costs[2].update_s == 0


def test_a_second_pipeline_sums_gradients_with_the_first() -> None:
    graph = perceptron([16, 16, 16])
    given = problem(graph, cluster(2), optimizer=ADAM)
    (one, two), (other, another) = (
        cut(graph, [0, 2], groups).stages for groups in ([(0,), (1,)], [(1,), (0,)])
    )
    placement = Placement((one, two, replace(other, pipeline=1), replace(another, pipeline=1)))
    costs = stage_costs(given, placement)
    single = stage_costs(given, cut(graph, [0, 2], [(0,), (1,)]))
    assert [cost.static_bytes for cost in costs] == [cost.static_bytes for cost in single] * 2
    assert {cost.gradient_s for cost in costs} == {
        all_reduce(given.cluster, range(2)).seconds(4 * 16 * 16)
    }
    assert (
        device_memory(given, placement, costs)[0]
        > device_memory(given, Placement((one, two)), single)[0]
    )


def test_recomputation_keeps_what_arrives_and_runs_forward_twice() -> None:
    graph = perceptron([16, 32, 64, 4])
    given = problem(graph, cluster(2))
    plain = stage_costs(given, cut(graph, [0, 2], [(0,), (1,)]))
    again = stage_costs(given, cut(graph, [0, 2], [(0,), (1,)], recompute=True))
    assert plain[1].kept_bytes == 4 * 8 * (32 + 64 + 4)
    assert again[1].kept_bytes == 4 * 8 * 32
    assert again[0].kept_bytes == 0, "the first stage's data is there anyway"
    assert again[1].backward_s == pytest.approx(plain[1].backward_s + plain[1].forward_s)
    given_back = 4 * 8 * 4
    kept = 4 * 8 * (32 + 64)
    gradients = 4 * 8 * (64 + 64)
    assert again[1].transient_bytes == given_back + kept + gradients, "at the first relu"


def test_a_long_stage_keeps_what_passes_between_its_segments() -> None:
    graph = perceptron([16] * 33)
    given = problem(graph, cluster(1))
    (plain,), (again,) = (
        stage_costs(given, cut(graph, [0], [(0,)], recompute=each)) for each in (False, True)
    )
    value = 4 * 8 * 16
    assert plain.kept_bytes == 32 * value, "relu's result is what the next product reads"
    assert again.kept_bytes % value == 0
    segments = 1 + again.kept_bytes // value
    assert 2 < segments < 8
    largest = -(-32 // segments)
    assert again.transient_bytes <= (largest + 4) * value


def test_splits_of_a_weight_share_it_and_pay_for_the_sum() -> None:
    builder = Builder(8, 16)
    graph = builder.finish(builder.linear(builder.linear("x", 32), 16))
    given = problem(graph, cluster(2), micro_batches=1)
    halves = Placement((Stage((0, 1), (0, 1), 8, ((0, (Split("n", 2),)), (1, (Split("k", 2),)))),))
    (cost,) = stage_costs(given, halves)
    (whole,) = stage_costs(given, Placement((Stage((0, 1), (0,), 8),)))
    assert cost.parameter_bytes == whole.parameter_bytes / 2
    assert cost.gradient_s == 0.0, "each device has its own part"
    exchanged = all_reduce(given.cluster, range(2)).seconds(4 * 8 * 16)
    shares = node_seconds(given.work, given.cluster.devices[0], "fp32", 0.5)
    assert cost.forward_s == pytest.approx(shares[0].sum() + exchanged)


def test_edges_carry_each_value_once_a_stage_that_reads_it() -> None:
    builder = Builder(8, 16)
    hidden = builder.linear("x", 32)
    middle = builder.relu(hidden)
    graph = builder.finish(builder.linear(builder.add(middle, hidden), 4))
    size = 4 * 8 * 32
    sent = edge_bytes(problem(graph, cluster(3)), cut(graph, [0, 1, 2], [(0,), (1,), (2,)]))
    assert sent == {(0, 1): size, (0, 2): size, (1, 2): size}


def test_memory_is_checked_and_recomputation_turned_on_where_it_helps() -> None:
    graph = perceptron([4] * 9)
    placement = cut(graph, [0, 8], [(0,), (1,)])
    loose = problem(graph, cluster(2))
    used = device_memory(loose, placement, stage_costs(loose, placement))
    assert micro_batches_in_flight(loose, placement) == (2, 1)
    assert with_required_recomputation(loose, placement) == placement
    tight = replace(loose, memory_limit=max(used) - 1)
    assert with_required_recomputation(tight, placement) == placement, (
        "a schedule may keep fewer micro-batches than 1F1B"
    )
    least = max(
        device_memory(
            replace(loose, batch_size=8, micro_batches=1), placement, stage_costs(loose, placement)
        )
    )
    assert with_required_recomputation(replace(loose, memory_limit=least), placement) == placement
    with pytest.raises(
        InfeasibleError, match=r"stage 1 of 2 needs .* on device 1, 1 byte over the limit"
    ):
        with_required_recomputation(replace(loose, memory_limit=least - 1), placement)
    again = with_required_recomputation(replace(tight, recompute="auto"), placement)
    assert [stage.recompute for stage in again.stages] == [True, False]
    with pytest.raises(InfeasibleError, match="over the limit of"):
        with_required_recomputation(replace(loose, recompute="auto", memory_limit=1), placement)


def test_a_parameter_that_stages_would_cut_differently_is_held_whole() -> None:
    graph = tied()
    given = problem(graph, cluster(3))
    first = Stage((0, 1), (0, 1), 8, ((0, (Split("n", 2),)), (1, (Split("x1", 2),))))
    alone = stage_costs(given, Placement((first, Stage((2,), (2,), 8))))
    assert [cost.parameter_bytes for cost in alone] == [4 * 16 * 16] * 2
    assert alone[0].gradient_s == all_reduce(given.cluster, range(3)).seconds(4 * 16 * 16)
