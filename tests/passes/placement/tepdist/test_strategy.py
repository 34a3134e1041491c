"""Tests of the outer search: its choice, its constraints, and the requests that it rejects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import build, configure
from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Constraint, Mode, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.placement.tepdist.strategy import StepBounds, TePDist, enumerate_meshes
from autopipe.passes.schedule.limits import quick_step
from autopipe.passes.schedule.tessel.scheduler import Tessel
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import cluster, perceptron, problem

GRAPH = perceptron([12, 24, 12, 24, 12])
"""matmul0 relu1 matmul2 relu3 matmul4 relu5 matmul6 relu7, on eight samples."""


def open_problem(devices: int = 4, **fields: Any) -> Problem:
    """Eight samples in micro-batches of any size."""
    return replace(
        problem(GRAPH, cluster(devices)),
        micro_batches=1,
        batch_size=8,
        micro_batch_sizes=(1, 2, 4, 8),
        **fields,
    )


def step_of(given: Problem, placement: Placement) -> float:
    own = with_micro_batch_size(given, placement.stages[0].micro_batch_size)
    return quick_step(own, placement, stage_costs(own, placement)).end


def zoo_problem(name: str, devices: Cluster, samples: int = 16) -> Problem:
    graph, loss = small_graph(name, samples)
    base = problem(GRAPH, devices)
    sizes = tuple(size for size in range(1, samples + 1) if samples % size == 0)
    return replace(
        base,
        graph=graph,
        work=roofline_costs(graph),
        batch_size=samples,
        micro_batches=1,
        loss=loss,
        micro_batch_sizes=sizes,
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_it_makes_the_requested_number_of_stages(stages: int) -> None:
    found = TePDist(stages=stages).run(open_problem())
    assert [len(stage.devices) for stage in found.stages] == [4 // stages] * stages
    assert found.notes[0].startswith(f"{stages} stage")


def test_the_choice_is_no_slower_than_any_number_of_stages() -> None:
    given = open_problem()
    best = step_of(given, TePDist().run(given))
    assert all(best <= step_of(given, TePDist(stages=stages).run(given)) for stages in (1, 2, 4))


def test_notes_have_a_line_per_mesh_the_fastest_first() -> None:
    notes = TePDist().run(open_problem(8)).notes
    assert [note.partition(" stage")[0] for note in sorted(notes[:4])] == ["1", "2", "4", "8"]
    assert "the best of" in notes[0]


def test_the_time_limit_ends_the_search_with_the_best_placement() -> None:
    found = TePDist().run(open_problem(8, time_limit=1e-9))
    assert [note.endswith("skipped because time was up") for note in found.notes[:4]] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("stages", [None, 2])
def test_inference(stages: int | None) -> None:
    found = TePDist(stages=stages).run(open_problem(mode=Mode.INFER, loss=None))
    assert stages is None or len(found.stages) == stages


def test_equal_requests_have_equal_placements() -> None:
    assert TePDist().run(open_problem()) == TePDist().run(open_problem())


def test_a_given_number_of_micro_batches_is_kept() -> None:
    given = replace(open_problem(), micro_batches=4, micro_batch_sizes=())
    given = with_micro_batch_size(replace(given, micro_batches=1), 2)
    assert {stage.micro_batch_size for stage in TePDist().run(given).stages} == {2}


@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_that_a_constraint_requires(size: int) -> None:
    given = open_problem(constraints=(Constraint("matmul2", micro_batch_size=size),))
    assert {stage.micro_batch_size for stage in TePDist().run(given).stages} == {size}


def test_constraints_on_stages_devices_and_splits_are_kept() -> None:
    found = TePDist().run(open_problem(constraints=(Constraint("matmul4", stage=1),)))
    assert 4 in found.stages[1].nodes
    found = TePDist().run(open_problem(constraints=(Constraint("matmul6", devices=(3, 2)),)))
    assert next(stage.devices for stage in found.stages if 6 in stage.nodes) == (3, 2)
    found = TePDist(stages=1).run(
        open_problem(constraints=(Constraint("matmul4", split=(("n", 2), ("b", 2))),))
    )
    assert found.stages[0].splits_of(4) == (Split("n", 2), Split("m", 2))


def test_unequal_groups_of_devices_that_constraints_require() -> None:
    asked = Constraint("matmul0", devices=(0,)), Constraint("matmul6", devices=(1, 2, 3))
    given = open_problem(3, constraints=(asked[0], replace(asked[1], devices=(1, 2))))
    strategy = TePDist(stages=2)
    strategy.requires(given)
    assert [stage.devices for stage in strategy.run(given).stages] == [(0,), (1, 2)]
    assert [stage.devices for stage in TePDist().run(open_problem(constraints=asked)).stages] == [
        (0,),
        (1, 2, 3),
    ]


@pytest.mark.parametrize(
    ("strategy", "constraints", "message"),
    [
        (TePDist(stages=2), (Constraint("matmul0", stage=2),), "requires stage 2"),
        (
            TePDist(stages=4),
            (Constraint("matmul0", devices=(0, 1)),),
            "requires devices \\[0, 1\\]",
        ),
        (
            TePDist(),
            (Constraint("matmul0", devices=(0, 1)), Constraint("relu1", devices=(1, 2))),
            "requires devices",
        ),
        (TePDist(), (Constraint("matmul0", split=(("n", 3),)),), "of the node's stage"),
        (TePDist(), (Constraint("matmul0", micro_batch_size=3),), "micro-batches of 3 samples"),
        (TePDist(), (Constraint("nothing"),), "matches the name of no node"),
    ],
)
def test_constraints_that_cannot_be_satisfied_are_named(
    strategy: TePDist, constraints: tuple[Constraint, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategy.run(open_problem(constraints=constraints))


@pytest.mark.parametrize(("stages", "message"), [(3, "one of 1, 2, 4"), (0, "one of 1, 2, 4")])
def test_stages_that_do_not_divide_the_devices(stages: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TePDist(stages=stages).requires(open_problem())
    assert message in caught.value.hint


def test_insufficient_memory_is_reported_with_the_excess() -> None:
    with pytest.raises(InfeasibleError, match="over the limit"):
        TePDist().run(open_problem(memory_limit=100))


def test_the_memory_limit_is_met_by_recomputation_if_permitted() -> None:
    free = TePDist().run(open_problem(recompute="auto"))
    own = with_micro_batch_size(open_problem(), free.stages[0].micro_batch_size)
    most = max(cost.memory_bytes(1) for cost in stage_costs(own, free))
    tight = open_problem(memory_limit=int(most * 0.8), recompute="auto")
    found = TePDist().run(tight)
    own = with_micro_batch_size(tight, found.stages[0].micro_batch_size)
    assert all(cost.memory_bytes(1) <= most * 0.8 for cost in stage_costs(own, found))


def test_a_bound_is_never_above_a_step() -> None:
    given = open_problem(8)
    bounds = StepBounds(given)
    for mesh in enumerate_meshes(given.cluster):
        for size in given.micro_batch_sizes:
            own = replace(with_micro_batch_size(given, size), micro_batch_sizes=())
            found = TePDist(stages=mesh.stages).run(own)
            assert bounds.minimum_step_s(mesh, 8 // size) <= step_of(own, found) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpt", "two-branch"])
def test_never_slower_than_strategies_in_its_search_space(name: str) -> None:
    given = zoo_problem(name, cluster(4))
    best = step_of(given, TePDist().run(given))
    for rival in (DataParallel(), Pase(), PipeDream()):
        assert best <= step_of(given, rival.run(given)) * (1 + 1e-9), rival.name


def test_a_million_classes_are_split_without_constraints(tmp_path: Path) -> None:
    settings = {"size": "million", "loss": "true", "weights": "none"}
    build(configure("vgg19", settings)).save(tmp_path / "vgg.onnx")
    model = read_model(tmp_path / "vgg.onnx", batch=256, scores="recompute")
    links = build_cluster(cluster_preset("tepdist-m8"), 8)
    given = Problem(model.graph, roofline_costs(model.graph), links, 256, 1, Mode.TRAIN, model.loss)
    (stage,) = TePDist().run(given).stages
    (last,) = (
        index for index, node in enumerate(model.graph.nodes) if node.op == "LinearCrossEntropy"
    )
    assert stage.splits_of(last) == (Split("c", 8),)
    first = next(index for index, node in enumerate(model.graph.nodes) if node.op == "Conv")
    assert stage.splits_of(first) == sample_axes(model.graph).splits([first], 8)[0][1], (
        "convolutions share samples"
    )


def test_tessel_schedules_its_stages() -> None:
    given = zoo_problem("gpt", cluster(4))
    placement = TePDist(stages=4).run(given)
    own = with_micro_batch_size(given, placement.stages[0].micro_batch_size)
    scheduler = Tessel()
    scheduler.requires(own, placement)
    scheduler.run(own, placement).verify(StageGraph.of(own, placement), train=True)
