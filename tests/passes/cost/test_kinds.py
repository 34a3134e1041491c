"""What a stage costs on devices of one kind or another, and which devices a stage may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Link
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.measured_costs import AffineTime, ExchangeCost, TaskCosts, TensorCosts
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Constraint, Optimizer
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.communication import all_gather, all_reduce, transfer_times_by_level
from autopipe.passes.cost.memory_check import (
    check_single_stage_devices,
    check_stage_devices,
    describe_device_types,
    equal_device_ranges,
    may_share_stage,
    with_required_recomputation,
)
from autopipe.passes.cost.roofline import posting_seconds
from autopipe.passes.cost.stages import stage_costs
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.cost.mixed import OUTER, kind, mixed_cluster

FAST = kind(4.0)
SLOW = kind(1.0, memory=10**8)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.sampled_from([16, 64, 256]), min_size=3, max_size=6),
    st.permutations(range(4)),
    st.integers(1, 3),
    st.sampled_from([Optimizer(), Optimizer("adamw")]),
)
def test_a_stage_costs_what_it_costs_where_all_devices_are_the_slowest_of_its_group(
    widths: list[int], devices: list[int], width: int, optimizer: Optimizer
) -> None:
    graph = perceptron(widths, batch=12)
    both = problem(
        graph,
        replace(mixed_cluster([(2, FAST), (2, SLOW)]), allow_mixed_stages=True),
        optimizer=optimizer,
    )
    samples = sample_axes(graph)
    group = tuple(devices[:width])
    nodes = tuple(range(len(graph.nodes)))
    placement = Placement((Stage(nodes, group, 12, samples.splits(nodes, width)),))
    (cost,) = stage_costs(both, placement)
    slowest = SLOW if any(device >= 2 for device in group) else FAST
    uniform = replace(both, cluster=replace(both.cluster, devices=(slowest,) * 4))
    (alone,) = stage_costs(uniform, placement)
    assert cost == alone


def test_memory_is_that_of_the_device() -> None:
    graph = perceptron([2000, 2000, 2000])
    both = problem(graph, mixed_cluster([(1, FAST), (1, kind(1.0, memory=20 * 10**6))]))
    first = Placement((Stage(tuple(range(4)), (0,), 8),))
    assert with_required_recomputation(both, first) == first
    with pytest.raises(
        InfeasibleError, match=r"stage 0 of 1 needs .* on device 1, .* over the limit of 19.07 MiB"
    ):
        with_required_recomputation(both, Placement((Stage(tuple(range(4)), (1,), 8),)))


def test_runs_of_one_kind() -> None:
    both = mixed_cluster([(2, FAST), (3, SLOW)])
    assert equal_device_ranges(both) == (range(2), range(2, 5))
    assert equal_device_ranges(replace(both, allow_mixed_stages=True)) == (range(5),)
    assert equal_device_ranges(mixed_cluster([(2, FAST), (1, FAST)])) == (range(3),)
    assert describe_device_types(both, range(5)) == "2 x4 and 3 x1"


def test_a_stage_straddles_kinds_only_where_it_is_asked_to() -> None:
    both = problem(perceptron([16, 16, 16]), mixed_cluster([(2, FAST), (2, SLOW)]))
    straddling = Placement((Stage(tuple(range(4)), (1, 2), 8),))
    assert may_share_stage(both, (0, 1)) and not may_share_stage(both, (1, 2))
    with pytest.raises(
        InfeasibleError, match="stage 0 would have devices of different kinds: 1 x4 and 1 x1"
    ):
        check_stage_devices(both, straddling)
    with pytest.raises(
        InfeasibleError,
        match="somebody would put one stage on devices of different kinds: 2 x4 and 2",
    ):
        check_single_stage_devices(both, "somebody")
    everywhere = replace(both, constraints=(Constraint("*", devices=()),))
    check_single_stage_devices(everywhere, "somebody")
    assert not may_share_stage(everywhere, (1, 2))
    check_stage_devices(replace(both, constraints=(Constraint("*", devices=(2, 1)),)), straddling)
    check_stage_devices(
        replace(both, cluster=replace(both.cluster, allow_mixed_stages=True)), straddling
    )


def test_groups_of_nodes_that_are_alike_exchange_as_in_one_hierarchy() -> None:
    apart = mixed_cluster([(4, FAST), (4, FAST)])
    together = cluster(8, per_node=4)
    for group in ((0, 1), (0, 3, 5), (0, 1, 4, 5), tuple(range(8)), (4, 7), (0, 4)):
        for collective in (all_reduce, all_gather):
            for size in (1e3, 1e6, 1e9):
                assert collective(apart, group).seconds(size) == pytest.approx(
                    collective(together, group).seconds(size)
                )
    # Columns of a mesh share what leaves a group.
    assert all_reduce(apart, (0, 4), range(8)).seconds(1e9) == pytest.approx(
        all_reduce(together, (0, 4), range(8)).seconds(1e9)
    )


def line(link: Link) -> AffineTime:
    return AffineTime(link.latency_s, 1 / link.bandwidth_bytes_per_s)


def test_what_groups_exchange_goes_over_the_slowest_link() -> None:
    both = mixed_cluster([(2, FAST), (3, SLOW)])
    assert transfer_times_by_level(both, (2, 3, 4)) == ((1, line(both.groups[1].levels[0].link)),)
    assert transfer_times_by_level(both, (0, 1, 2)) == ((1, line(OUTER)),)
    assert all_reduce(both, range(5)).seconds(1e9) == pytest.approx(2 * 4 / 5 * 1e9 / 1e9, rel=0.01)


def test_collectives_and_posts_are_those_measured_on_the_kind() -> None:
    def measured(seconds: float) -> ExchangeCost:
        return ExchangeCost("all_reduce", 2, AffineTime(seconds, 0.0), ())

    tasks = TaskCosts(
        0.25,
        0.5,
        0.0,
        0.0,
        TensorCosts(0.0, 0.0),
        TensorCosts(0.0, 0.0),
        (TensorCosts(0.0, 0.0),) * 3,
    )
    fast = replace(FAST, collectives=(measured(3.0),), post=AffineTime(1.0, 0.0))
    slow = replace(SLOW, collectives=(measured(7.0),), tasks=tasks)
    both = mixed_cluster([(2, fast), (2, slow)])
    assert (all_reduce(both, (0, 1)).seconds(8), all_reduce(both, (2, 3)).seconds(8)) == (3.0, 7.0)
    assert all_reduce(both, (1, 2)).seconds(8) < 1.0
    given_ = problem(perceptron([16, 16, 16]), both)
    plain = problem(perceptron([16, 16, 16]), mixed_cluster([(2, FAST), (2, SLOW)]))
    placement = Placement((Stage((0, 1), (0,), 8), Stage((2, 3), (2,), 8)))
    costs = stage_costs(given_, placement)
    others = stage_costs(plain, placement)
    assert [
        one.forward_s - two.forward_s for one, two in zip(costs, others, strict=True)
    ] == pytest.approx([1.0, 0.25])


def test_messages_of_one_task_take_less_each() -> None:
    device = replace(FAST, post=AffineTime(3.0, 0.5), follow=AffineTime(1.0, 7.0))
    assert [posting_seconds(device, count, 8.0 * count) for count in (0, 1, 3)] == [
        0.0,
        3.0 + 4.0,
        3.0 + 12.0 + 2.0,
    ]
    assert posting_seconds(replace(device, follow=None), 3, 24.0) == 3 * 3.0 + 12.0
    assert posting_seconds(FAST, 3, 24.0) == 0.0
