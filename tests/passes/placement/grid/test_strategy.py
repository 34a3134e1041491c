"""The grid: what it chooses, obeys and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopipe.ir.errors import ConfigurationError, InfeasibleError, OutOfMemoryError
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Constraint, Optimizer, Problem
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.memory_check import size_text, with_required_recomputation
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement import grid as search
from autopipe.passes.placement.grid import (
    Degrees,
    Grid,
    GridSearch,
    GridTrial,
    factorisations,
    place_grid,
)
from autopipe.passes.schedule.limits import quick_step, quick_step_seconds
from autopipe.passes.schedule.published.one_f_one_b import InterleavedOneForwardOneBackward
from autopipe.passes.schedule.published.zero_bubble import DualPipe, ZeroBubbleV
from autopipe.passes.sharding.regions import graph_megatron_splits
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import cluster, perceptron, problem


def open_problem(name: str = "gpt", devices: int = 8, samples: int = 16, **fields: Any) -> Problem:
    """A small model of the zoo on micro-batches of any size."""
    graph, loss = small_graph(name, samples)
    sizes = tuple(size for size in range(1, samples + 1) if samples % size == 0)
    base = replace(
        problem(perceptron([8, 8]), cluster(devices)),
        graph=graph,
        work=roofline_costs(graph),
        loss=loss,
    )
    return replace(base, batch_size=samples, micro_batches=1, micro_batch_sizes=sizes, **fields)


def step_of(given: Problem, placement: Placement) -> float:
    own = with_micro_batch_size(given, placement.stages[0].micro_batch_size)
    return quick_step(own, placement, stage_costs(own, placement)).end


@pytest.mark.parametrize("degrees", [(2, 2, 2), (4, 2, 1), (1, 4, 2), (2, 1, 4), (8, 1, 1)])
def test_degrees_are_obeyed(degrees: tuple[int, int, int]) -> None:
    pipeline, data, tensor = degrees
    found = Grid(pipeline=pipeline, data=data, tensor=tensor).run(open_problem())
    assert len(found.stages) == pipeline and {len(stage.devices) for stage in found.stages} == {
        data * tensor
    }
    cut = {split.degree for stage in found.stages for _, splits in stage.splits for split in splits}
    assert cut == {data, tensor} - {1}


@pytest.mark.parametrize("samples", [1, 2])
def test_tensor_devices_hold_equal_parts_of_every_matrix(samples: int) -> None:
    """Embedding and head included, and with micro-batches of one sample, too."""
    graph, loss = small_graph("llama", samples)
    given = replace(
        open_problem("llama", devices=4), graph=graph, work=roofline_costs(graph), loss=loss
    )
    given = replace(given, batch_size=4 * samples, micro_batches=4, micro_batch_sizes=())
    placement = Grid(pipeline=2, data=1, tensor=2).run(given)
    sizes = {each.value.name: each.value for each in graph.parameters}
    expected = []
    for stage in placement.stages:
        read = {name for node in stage.nodes for name in graph.nodes[node].inputs if name in sizes}
        parts = (sizes[name].bytes // (2 if len(sizes[name].shape) == 2 else 1) for name in read)
        expected.append(sum(parts))
    assert [cost.parameter_bytes for cost in stage_costs(given, placement)] == expected


@pytest.mark.parametrize("samples", [1, 2])
def test_positions_that_the_graph_fixes_are_not_shared(samples: int) -> None:
    graph, _ = small_graph("gpt", samples)
    splits = graph_megatron_splits(graph, 1, 2)
    lookups = {
        each.inputs[0]: splits.get(node)
        for node, each in enumerate(graph.nodes)
        if each.op == "Gather"
    }
    assert lookups == {
        "token_embedding.weight": (Split("d0", 2),),
        "position_embedding.weight": None,
    }


def test_one_degree_given_leaves_the_others_open() -> None:
    assert len(Grid(pipeline=4).run(open_problem()).stages) == 4
    found = Grid(data=1).run(open_problem())
    assert found.stages[0].micro_batch_size in open_problem().micro_batch_sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": 3}, "pipeline 3 is 3, which does not divide the 8 devices"),
        (
            {"pipeline": 2, "data": 2, "tensor": 4},
            "pipeline 2 x data 2 x tensor 4 is 16, which does not make the 8",
        ),
        ({"pipeline": 2, "data": 8}, "pipeline 2 x data 8 is 16"),
        ({"tensor": 0}, "tensor is 0"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0"),
        (
            {"style": "v"},
            "style v requires stages_per_rank of at least 2, but stages_per_rank is 1",
        ),
        (
            {"opposite": True, "stages_per_rank": 2},
            "opposite requires stages_per_rank 1, but stages_per_rank is 2",
        ),
        ({"opposite": True, "pipeline": 1}, "require an even pipeline degree, but pipeline is 1"),
    ],
)
def test_contradictions_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Grid(**options).requires(open_problem())


def test_samples_that_replicas_cannot_share_are_refused() -> None:
    given = replace(open_problem(), micro_batches=16, micro_batch_sizes=())
    given = replace(
        given, graph=small_graph("gpt", 1)[0], work=roofline_costs(small_graph("gpt", 1)[0])
    )
    with pytest.raises(
        InfeasibleError, match="cannot split a micro-batch of 1 sample evenly over 8 replicas"
    ):
        Grid(data=8).run(given)


def test_what_is_chosen_is_no_slower_than_any_other_degrees() -> None:
    given = open_problem("llama")
    best = step_of(given, Grid().run(given))
    others = [Grid(each.pipeline, each.data, each.tensor) for each in factorisations(given.cluster)]
    steps = []
    for other in others:
        try:
            steps.append(step_of(given, other.run(given)))
        except InfeasibleError:
            # More stages than there are operators, or layers that so many devices cannot share.
            continue
    assert len(steps) > 4 and best <= min(steps) * (1 + 1e-9)


def test_what_is_chosen_is_near_the_best_of_all_degrees_and_sizes() -> None:
    given = open_problem("gpt", devices=4)
    best = step_of(given, Grid().run(given))
    steps = []
    for size in given.micro_batch_sizes:
        own = with_micro_batch_size(given, size)
        for degrees in factorisations(given.cluster):
            try:
                placement = with_required_recomputation(
                    own, place_grid(own, degrees, 1, style="loop")
                )
                steps.append(quick_step_seconds(own, placement, stage_costs(own, placement)))
            except InfeasibleError:
                continue
    assert best <= min(steps) * 1.02


def test_what_is_tried_first_makes_few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    trial = GridSearch._run_trial

    def noted(self: GridSearch, problem: Problem, degrees: Degrees) -> GridTrial:
        sizes.append(problem.micro_batch_size)
        return trial(self, problem, degrees)

    monkeypatch.setattr(GridSearch, "_run_trial", noted)
    monkeypatch.setattr(search, "_TASKS", 16)
    best = step_of(open_problem(), Grid(4, 1, 2).run(open_problem()))
    assert sizes[0] == 16 // (16 // 4), "four micro-batches through four stages"
    assert len(sizes) == len(set(sizes))
    monkeypatch.setattr(search, "_TASKS", 2**14)
    sizes.clear()
    assert step_of(open_problem(), Grid(4, 1, 2).run(open_problem())) == best
    assert sizes[0] == 1


def test_memory_asks_for_more_parts() -> None:
    given = open_problem("gpt", optimizer=Optimizer("adamw"))
    whole = stage_costs(*_on_one(given))[0].static_bytes
    found = Grid().run(replace(given, memory_limit=whole // 3, recompute="auto"))
    assert len(found.stages) > 1 or any(len(splits) == 2 for _, splits in found.stages[0].splits)
    with pytest.raises(InfeasibleError, match="over the limit"):
        Grid().run(replace(given, memory_limit=whole // 100))


@pytest.mark.parametrize("recompute", ["none", "full", "auto"])
@pytest.mark.parametrize("options", [{}, {"tensor": 2}, {"pipeline": 2, "tensor": 2}])
def test_a_refusal_names_the_degrees_that_need_least(
    recompute: str, options: dict[str, int]
) -> None:
    given = open_problem("gpt", optimizer=Optimizer("adamw"), recompute=recompute)
    every = tuple(factorisations(given.cluster, **options))
    peaks = {}
    for degrees in every:
        own = with_micro_batch_size(given, degrees.data)
        own = replace(own, recompute="none" if recompute == "none" else "full")
        try:
            placement = place_grid(own, degrees, 1, style="loop")
        except InfeasibleError:
            continue
        peaks[degrees] = max(quick_step(own, placement, stage_costs(own, placement)).peak_memory)
    need = min(peaks.values())
    with pytest.raises(OutOfMemoryError, match="over the limit") as caught:
        Grid(**options).run(replace(given, memory_limit=need - 1024))
    message = caught.value.message
    assert f"{size_text(need)} on device" in message and "1.00 KiB over the limit" in message
    assert any(
        f"with {degrees}, micro-batch size {degrees.data}" in message
        for degrees in peaks
        if peaks[degrees] == need
    )
    assert (f"the minimum of {len(every)} combinations of pipeline" in message) is (len(every) > 1)
    assert Grid(**options).run(replace(given, memory_limit=need)).stages


def _on_one(given: Problem) -> tuple[Problem, Placement]:
    own = with_micro_batch_size(given, 1)
    return own, place_grid(own, Degrees(1, 1, 1), 1, style="loop")


def test_recomputation_is_obeyed() -> None:
    for recompute in ("none", "full"):
        found = Grid(pipeline=2).run(open_problem(recompute=recompute))
        assert {stage.recompute for stage in found.stages} == {recompute == "full"}


def test_chunks_are_looped_or_folded_as_schedules_want_them() -> None:
    given = open_problem()
    looped = Grid(pipeline=2, data=2, tensor=2, stages_per_rank=2).run(given)
    assert [stage.devices[0] for stage in looped.stages] == [0, 4, 0, 4]
    own = with_micro_batch_size(given, 2)
    InterleavedOneForwardOneBackward().requires(own, _of_size(own, looped))
    folded = Grid(pipeline=2, data=2, tensor=2, stages_per_rank=2, style="v").run(given)
    assert [stage.devices[0] for stage in folded.stages] == [0, 4, 4, 0]
    ZeroBubbleV().requires(own, _of_size(own, folded))


def test_two_pipelines_take_opposite_directions_with_copies_of_the_parameters() -> None:
    given = with_micro_batch_size(open_problem(), 2)
    one, two = (
        place_grid(given, Degrees(2, 2, 2), 1, False, opposite) for opposite in (False, True)
    )
    assert [(stage.pipeline, stage.devices[0]) for stage in two.stages] == [
        (0, 0),
        (0, 4),
        (1, 4),
        (1, 0),
    ]
    assert [stage.nodes for stage in two.stages] == 2 * [stage.nodes for stage in one.stages]
    DualPipe().requires(given, two)
    alone = static_memory(given, one)
    both = static_memory(given, two)
    # The tied embedding, which the first and the last stage need, is there once.
    assert alone[0] < both[0] == both[4] < alone[0] + alone[4]


def test_two_directions_need_an_even_number_of_groups() -> None:
    given = open_problem()
    assert len(Grid(tensor=4, opposite=True).run(given).stages) == 4
    with pytest.raises(InfeasibleError, match="require an even pipeline degree"):
        Grid(tensor=8, opposite=True).run(given)
    with pytest.raises(ConfigurationError, match="grid does not support constraints"):
        Grid(opposite=True).requires(replace(given, constraints=(Constraint("*", stage=0),)))


def _of_size(given: Problem, placement: Placement) -> Placement:
    stages = (replace(stage, micro_batch_size=given.micro_batch_size) for stage in placement.stages)
    return Placement(tuple(stages))


def test_replicas_are_neighbours_or_apart() -> None:
    assert Degrees(2, 2, 2).groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Degrees(2, 2, 2, apart=True).groups() == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_tensor_groups_stay_in_a_node_where_they_are_open() -> None:
    within = cluster(16).devices_per_node
    assert max(each.tensor for each in factorisations(cluster(16))) <= within
    assert {each.tensor for each in factorisations(cluster(16), tensor=16)} == {16}


def test_constraints_are_fulfilled_or_refused() -> None:
    given = open_problem()
    last = len(given.graph.nodes) - 1
    wish = Constraint(given.graph.nodes[last].name, stage=1)
    assert Grid(pipeline=2).run(replace(given, constraints=(wish,))).stage_of()[last] == 1
    with pytest.raises(ConfigurationError, match="requires stage 5, but grid has 2 stages"):
        Grid(pipeline=2).run(replace(given, constraints=(replace(wish, stage=5),)))
    split = Constraint(given.graph.nodes[last].name, split=(("b", 8),))
    with pytest.raises(ConfigurationError, match="grid does not support this constraint"):
        Grid(pipeline=2, data=2).run(replace(given, constraints=(split,)))
