"""What graphpipe finds for models with branches computes what one device does, under each schedule
that takes it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from tests.distributed.support.branching import (
    BATCH,
    check_step,
    cluster_of,
    schedules_of,
    side_by_side,
    training,
    with_own_sizes,
)
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import Trained
from tests.distributed.support.zoo import SmallModels, small_graph

MODELS = ("two-branch", "mmt", "dlrm", "candle-uno")
SIZES = (1, 2, 4)
ALL_SIZES = (*SIZES, 8)
LATENCIES = (0.0, 1e-6, 1e-5)
DRAWN = 2
"""How often stages of a placement are given micro-batches of their own."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "devices", "size", "schedule"),
    [
        ("two-branch", 4, 4, "kfkb"),
        ("mmt", 4, 2, "1f1b"),
        ("dlrm", 4, 1, "tessel"),
        ("candle-uno", 4, 2, "kfkb"),
        ("mmt", 8, 4, "kfkb"),
        ("two-branch", 8, 2, "1f1b"),
    ],
)
def test_uniform_micro_batches(
    pools: Pools,
    small_models: SmallModels,
    tmp_path: Path,
    name: str,
    devices: int,
    size: int,
    schedule: str,
) -> None:
    model = small_models.of(name, size, BATCH // size)
    problem = training(model.graph, model.loss, cluster_of(devices, 1e-6))
    placement = GraphPipe().run(problem)
    assert side_by_side(problem, placement)
    check_step(pools, model, problem, placement, schedule, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "devices", "latency", "schedule"),
    [
        ("two-branch", 4, 1e-6, "tessel"),
        ("mmt", 4, 1e-6, "kfkb"),
        ("dlrm", 4, 1e-6, "kfkb"),
        ("candle-uno", 4, 1e-6, "tessel"),
        ("two-branch", 8, 1e-6, "kfkb"),
    ],
)
def test_micro_batches_of_their_own(
    pools: Pools,
    small_models: SmallModels,
    tmp_path: Path,
    name: str,
    devices: int,
    latency: float,
    schedule: str,
) -> None:
    model = small_models.of(name, 4, BATCH // 4)
    problem = training(model.graph, model.loss, cluster_of(devices, latency))
    placement = with_own_sizes(Random(name), problem, GraphPipe().run(problem))
    assert len({stage.micro_batch_size for stage in placement.stages}) > 1
    check_step(pools, model, problem, placement, schedule, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "devices", "schedule"), [("two-branch", 8, "kfkb"), ("mmt", 4, "tessel")]
)
def test_micro_batches_that_it_chooses(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, devices: int, schedule: str
) -> None:
    model, problem, placement = chosen(small_models, name, devices, 0.0)
    assert len({stage.micro_batch_size for stage in placement.stages}) > 1
    assert len({len(stage.devices) for stage in placement.stages}) > 1 or devices == 4
    check_step(pools, model, problem, placement, schedule, tmp_path)


def chosen(
    models: SmallModels, name: str, devices: int, latency: float
) -> tuple[Trained, Problem, Placement]:
    """What the strategy makes of a model where it may choose each stage's micro-batches, and what
    it computes.
    """
    graph, loss = small_graph(name, max(ALL_SIZES))
    problem = replace(
        training(graph, loss, cluster_of(devices, latency)), micro_batch_sizes=ALL_SIZES
    )
    placement = GraphPipe(per_stage_micro_batch=True).run(problem)
    largest = max(stage.micro_batch_size for stage in placement.stages)
    model = models.of(name, largest, BATCH // largest)
    return model, training(model.graph, model.loss, problem.cluster), placement


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_size_and_schedule(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, devices: int, latency: float
) -> None:
    for size in SIZES:
        model = small_models.of(name, size, BATCH // size)
        problem = training(model.graph, model.loss, cluster_of(devices, latency))
        found = GraphPipe().run(problem)
        drawn = (
            with_own_sizes(Random(seed), problem, found)
            for seed in range(DRAWN if size == max(SIZES) else 0)
        )
        for number, placement in enumerate((found, *drawn)):
            for schedule in schedules_of(placement):
                check_step(
                    pools,
                    model,
                    problem,
                    placement,
                    schedule,
                    tmp_path / f"{size}-{number}-{schedule}",
                )
    model, problem, placement = chosen(small_models, name, devices, latency)
    for schedule in schedules_of(placement):
        check_step(pools, model, problem, placement, schedule, tmp_path / schedule)
