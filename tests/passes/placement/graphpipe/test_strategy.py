from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, stage_edges
from autopipe.ir.problem import Constraint, MeasuredNodeTime, Mode, Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.graphpipe.micro_batch_search import simulate_1f1b
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from tests.exports.branches import exported
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem
from tests.passes.placement.graphpipe.models import (
    Shape,
    check_schedule,
    check_stages,
    model,
    shapes,
)

TWO = ("parallel", (("series", (256, 256)), ("series", (256, 256))))
"""Two branches of two pairs of linear layers."""


def sizes_of(batch: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, batch + 1) if batch % size == 0)


def chosen(graph: Graph, batch: int, devices: int, **more: object) -> Problem:
    """One whose micro-batches are the strategy's to choose."""
    memory = more.pop("memory", 10**9)
    assert isinstance(memory, int)
    given = problem(graph, cluster(devices, memory=memory), 1, **more)
    return replace(given, micro_batch_sizes=sizes_of(batch))


def unordered(graph: Graph, placement: Placement) -> list[tuple[int, int]]:
    """Pairs of stages of which neither waits for the other."""
    behind = [{stage} for stage in range(len(placement.stages))]
    for source, target in stage_edges(graph, placement):
        behind[target] |= behind[source]
    count = len(placement.stages)
    return [
        (one, other) for other in range(count) for one in range(other) if one not in behind[other]
    ]


def test_branches_are_stages_beside_one_another() -> None:
    given = chosen(model(TWO, 16), 16, 4)
    placement = GraphPipe().run(given)
    assert unordered(given.graph, placement)
    assert len({stage.micro_batch_size for stage in placement.stages}) == 1


@pytest.mark.parametrize("name", ["clip", "dlrm"])
def test_exported_models_become_concurrent_branches_without_a_hint(
    name: str, tmp_path: Path
) -> None:
    graph = read_model(exported(name, False, tmp_path), dims={}, batch=16).graph
    given = chosen(graph, 16, 4, loss="loss")
    given = replace(given, cluster=build_cluster(cluster_preset("summit"), 4))
    assert unordered(graph, GraphPipe().run(given))


@settings(max_examples=10)
@given(shapes(), st.sampled_from([2, 3, 4]), st.sampled_from([4, 12]))
def test_results_are_valid_and_never_slower_than_a_chain(
    shape: Shape, devices: int, batch: int
) -> None:
    given = chosen(model(shape, batch), batch, devices)
    placement = GraphPipe().run(given)
    placement.verify(given.graph)
    check_stages(given.graph, placement)
    ours, share = simulate_1f1b(
        with_micro_batch_size(given, placement.stages[0].micro_batch_size), placement
    )
    assert share <= 1
    for size in sizes_of(batch):
        alone = replace(with_micro_batch_size(given, size), micro_batch_sizes=())
        assert ours <= simulate_1f1b(alone, PipeDream().run(alone))[0] * (1 + 1e-9)


@pytest.mark.parametrize(("devices", "power"), [(2, 1.2), (4, 1.5), (8, 3)])
def test_measured_shares_may_take_less_than_their_part(devices: int, power: float) -> None:
    given = chosen(model(TWO, 16), 16, devices)
    name = given.cluster.devices[0].name
    points = tuple(
        (share, 1e-3 * share**power, 2e-3 * share**power)
        for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
    )
    work = tuple(
        replace(each, measured=(MeasuredNodeTime(name, True, points),)) for each in given.work
    )
    given = replace(given, work=work)
    placement = GraphPipe().run(given)
    check_stages(given.graph, placement)
    longest = max(each.forward_s + each.backward_s for each in stage_costs(given, placement))
    assert longest < 3e-3 * len(work) * devices**-power * 1.5, (
        "about as short as shares of all would be"
    )


def test_schedules_of_its_stages_meet_the_fourth_condition() -> None:
    given = chosen(model(TWO, 16), 16, 4)
    placement = GraphPipe().run(given)
    fixed = with_micro_batch_size(given, placement.stages[0].micro_batch_size)
    check_schedule(OneForwardOneBackward().run(fixed, placement))


def test_memory_is_what_1f1b_needs() -> None:
    graph = perceptron([64] * 9, batch=64)
    roomy = chosen(graph, 64, 2)
    need = max(device_memory(roomy, (best := GraphPipe().run(roomy)), stage_costs(roomy, best)))
    tight = chosen(graph, 64, 2, memory=need // 2)
    placement = GraphPipe().run(tight)
    fixed = with_micro_batch_size(tight, placement.stages[0].micro_batch_size)
    assert max(device_memory(fixed, placement, stage_costs(fixed, placement))) <= need // 2


def test_too_little_memory_is_told_with_the_least_that_is_missing() -> None:
    graph = perceptron([64] * 5, batch=4)
    with pytest.raises(
        InfeasibleError,
        match=r"over the limit of .*, in the placement with the lowest memory requirement",
    ) as caught:
        GraphPipe().run(chosen(graph, 4, 2, memory=20_000))
    assert "smaller micro-batches or a higher memory limit" in caught.value.hint
    # With the bytes that are missing it works.
    for memory in range(20_000, 200_000, 2_000):
        try:
            GraphPipe().run(chosen(graph, 4, 2, memory=memory))
        except InfeasibleError:
            continue
        break
    assert 20_000 < memory < 190_000


@pytest.mark.parametrize(("option", "expected"), [("none", {False}), ("full", {True})])
def test_recomputation_is_as_asked(option: str, expected: set[bool]) -> None:
    placement = GraphPipe().run(chosen(model(TWO, 16), 16, 2, recompute=option))
    assert {stage.recompute for stage in placement.stages} == expected


def test_recomputation_makes_room_where_it_is_left_open() -> None:
    """One sample cannot be shared, so the first of three stages keeps three times what it needs at
    once.
    """
    builder = Builder(1, 2)
    data = builder.linear("x", 4096)
    for _ in range(60):
        data = builder.relu(data)
    given = problem(builder.finish(data), cluster(3), 8)
    placement = GraphPipe().run(given)
    need = max(device_memory(given, placement, stage_costs(given, placement)))
    for share in range(95, 20, -5):
        tight = replace(given, memory_limit=need * share // 100)
        try:
            GraphPipe().run(tight)
        except InfeasibleError:
            found = GraphPipe().run(replace(tight, recompute="auto"))
            assert any(stage.recompute for stage in found.stages)
            return
    raise AssertionError("a fifth of the memory is enough")


def test_a_given_size_is_kept() -> None:
    given = problem(model(TWO, 4), cluster(2, flops=1e10), 6)
    assert {stage.micro_batch_size for stage in GraphPipe().run(given).stages} == {4}


def test_inference_too() -> None:
    given = chosen(model(TWO, 16), 16, 4, mode=Mode.INFER)
    placement = GraphPipe().run(given)
    check_stages(given.graph, placement)


def test_a_region_that_is_not_series_parallel_is_noted() -> None:
    builder = Builder(8, 16)
    first = builder.linear("x", 16)
    second = builder.linear("x", 16)
    third = builder.relu(first)
    fourth = builder.add(first, second)
    graph = builder.finish(builder.add(third, fourth))
    (note,) = GraphPipe().run(chosen(graph, 8, 2)).notes
    assert note.startswith("4 operators from 'matmul0' to 'add3' are not series-parallel")


def test_a_constraint_that_it_does_not_keep_is_refused() -> None:
    given = chosen(model(TWO, 16), 16, 2, constraints=(Constraint("matmul0", stage=7),))
    with pytest.raises(ConfigurationError, match="requires stage 7"):
        GraphPipe().run(given)


def test_equal_requests_have_equal_answers() -> None:
    given = chosen(model(TWO, 16), 16, 3)
    assert GraphPipe().run(given) == GraphPipe().run(given)


def test_depth_is_that_of_a_branch() -> None:
    """Four equal branches of four layers on four devices: each a stage, the one with the sum behind
    the others.
    """
    branch = ("series", (256, 256))
    given = chosen(model(("parallel", (branch,) * 4), 16), 16, 4)
    placement = GraphPipe().run(given)
    assert (
        StageGraph.of(
            with_micro_batch_size(given, placement.stages[0].micro_batch_size), placement
        ).depth
        <= 2
    )


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("0F1 0F0 0B0 0B1", "C4: 0F0 comes after"),
        ("0F0 0B0 0B1 0F1", "C4: 0B1 comes before its forward"),
    ],
)
def test_the_check_refuses_orders_that_break_the_fourth_condition(order: str, reason: str) -> None:
    tasks = tuple(Task(0, Phase(text[1]), int(text[2])) for text in order.split())
    with pytest.raises(InfeasibleError, match=reason):
        check_schedule(Schedule(2, (tasks,)))


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([((0, 2, 3), (0,)), ((1,), (1,))], "C2"),
        ([((1, 2, 3), (0,)), ((0,), (1,))], "C2"),
        ([((0, 1), (0,)), ((2,), (1,))], "C1: 1 nodes are in no stage"),
        ([((0, 1), (0,)), ((1, 2, 3), (1,))], "C1: .* is in stages 0 and 1"),
        ([((0, 1), (0,)), ((2, 3), (0,))], "C3"),
    ],
)
def test_the_check_refuses_what_is_no_stage_graph(
    stages: list[tuple[tuple[int, ...], tuple[int, ...]]], reason: str
) -> None:
    from autopipe.ir.placement import Stage

    graph = perceptron([16, 16, 16], batch=4)
    placement = Placement(tuple(Stage(nodes, devices, 4) for nodes, devices in stages))
    with pytest.raises(InfeasibleError, match=reason):
        check_stages(graph, placement)
