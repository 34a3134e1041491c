"""Order of the device groups of a heterogeneous cluster along a pipeline."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Device
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Constraint, Mode, Problem
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.device_order import (
    best_group_order,
    group_orders,
    ideal_step_s,
    partial_group_orders,
)
from autopipe.passes.schedule.limits import quick_step_seconds
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.cost.mixed import kind, mixed_cluster

A, B, C, D = (kind(speed) for speed in (1.0, 2.0, 4.0, 8.0))


def test_all_orders_of_few_types_and_two_of_many() -> None:
    assert list(group_orders(mixed_cluster([(2, A), (2, B)]))) == [(0, 1), (1, 0)]
    assert sorted(group_orders(mixed_cluster([(1, A), (1, B), (1, C)]))) == sorted(
        itertools.permutations(range(3))
    )
    assert list(group_orders(mixed_cluster([(1, A), (1, B), (1, C), (1, D)]))) == [
        (0, 1, 2, 3),
        (3, 2, 1, 0),
    ]
    assert list(group_orders(mixed_cluster([(1, A), (1, B), (1, A)]))) == [
        (0, 1, 2),
        (0, 2, 1),
        (1, 0, 2),
    ]
    assert list(group_orders(mixed_cluster([(2, A), (2, A)]))) == [(0, 1)]


def test_device_types_are_skipped_if_the_others_are_faster() -> None:
    assert list(partial_group_orders(mixed_cluster([(2, A), (2, B)]))) == [(0,), (1,)]
    three = list(partial_group_orders(mixed_cluster([(1, A), (1, B), (1, C)])))
    assert len(three) == len(set(three)) == 9 and list(map(len, three)) == [1] * 3 + [2] * 6
    tiny = kind(1e-3)
    for parts in ([(1, tiny), (1, C)], [(1, C), (1, tiny)]):
        given = problem(perceptron([128] * 3), mixed_cluster(parts))
        best = best_group_order(given, one_layer_per_device)
        assert [given.cluster.devices[stage.devices[0]] for stage in best.stages] == [C]
        assert len(best_group_order(given, one_layer_per_device, parts=False).stages) == 2
        named = replace(given, constraints=(Constraint("*", devices=()),))
        assert len(best_group_order(named, one_layer_per_device).stages) == 2


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([8, 128, 512]), min_size=4, max_size=6),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.integers(1, 4),
    st.sampled_from(list(Mode)),
)
def test_no_step_is_below_the_ideal(
    widths: list[int], counts: tuple[int, int], speed: float, micro_batches: int, mode: Mode
) -> None:
    cluster_ = mixed_cluster([(counts[0], A), (counts[1], kind(speed, name="other"))])
    given = problem(perceptron(widths), cluster_, micro_batches, mode)
    placements = [PipeDream().run(given), PipeDream(replicate=False).run(given)]
    for placement in placements:
        step = quick_step_seconds(given, placement, stage_costs(given, placement))
        assert 0 < ideal_step_s(given) <= step


def one_layer_per_device(given: Problem) -> Placement:
    """Return the placement with one layer per device, in order. The last device has all remaining
    layers.
    """
    count = given.cluster.size
    nodes = len(given.graph.nodes)
    ends = [2 * index for index in range(count)] + [nodes]
    pairs = enumerate(itertools.pairwise(ends))
    return Placement(
        tuple(Stage(tuple(range(*ends)), (index,), given.micro_batch_size) for index, ends in pairs)
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([8, 128, 512]), min_size=4, max_size=4), st.permutations([A, B, C]))
def test_the_best_order_has_the_shortest_step(widths: list[int], kinds: list[Device]) -> None:
    given = problem(perceptron(widths), mixed_cluster([(1, each) for each in kinds]))
    best = best_group_order(given, one_layer_per_device, parts=False)
    steps = []
    for order in itertools.permutations(range(3)):
        stages = tuple(
            replace(stage, devices=(order[i],))
            for i, stage in enumerate(one_layer_per_device(given).stages)
        )
        placement = Placement(stages)
        steps.append(quick_step_seconds(given, placement, stage_costs(given, placement)))
    assert quick_step_seconds(given, best, stage_costs(given, best)) == min(steps)


def test_constraints_name_the_devices_of_the_given_cluster() -> None:
    given = problem(perceptron([8, 512, 8]), mixed_cluster([(1, A), (1, C)]))
    constrained = replace(
        given, constraints=(Constraint("*", devices=(0,)), Constraint("*", devices=()))
    )
    seen: list[tuple[int, ...] | None] = []

    def place(ordered: Problem) -> Placement:
        seen.extend(each.devices for each in ordered.constraints)
        return one_layer_per_device(ordered)

    best_group_order(constrained, place)  # A constraint names devices, so no type is skipped.
    assert seen == [(0,), (), (1,), ()]


def test_an_order_without_a_placement_is_skipped() -> None:
    given = problem(perceptron([8, 8, 8]), mixed_cluster([(1, A), (1, C)]))

    def place(ordered: Problem) -> Placement:
        if ordered.cluster.devices[0] == A:
            raise InfeasibleError("the first device must be C")
        return one_layer_per_device(ordered)

    assert [stage.devices for stage in best_group_order(given, place, parts=False).stages] == [
        (1,),
        (0,),
    ]

    def always_fail(ordered: Problem) -> Placement:
        raise InfeasibleError(f"no placement on {ordered.cluster.devices[0].name}")

    with pytest.raises(InfeasibleError, match="no placement on x1"):
        best_group_order(given, always_fail)


def test_a_uniform_cluster_is_placed_once() -> None:
    calls = []

    def place(ordered: Problem) -> Placement:
        calls.append(ordered)
        return one_layer_per_device(ordered)

    given = problem(perceptron([8, 8, 8]), cluster(2))
    assert best_group_order(given, place) == one_layer_per_device(given) and calls == [given]
