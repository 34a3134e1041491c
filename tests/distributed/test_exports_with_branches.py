"""Exported models with branches are planned side by side without a hint, and compute what one
device does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from tests.distributed.support.branching import (
    BATCH,
    SCHEDULERS,
    check_step,
    cluster_of,
    side_by_side,
    training,
)
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import Trained, trained
from tests.distributed.test_strategies_of_exports import batch_for
from tests.exports.branches import MODELS, exported

SAMPLES = 4


@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
def test_branches_run_side_by_side(pools: Pools, tmp_path: Path, name: str) -> None:
    model = trained_export(pools, exported(name, False, tmp_path))
    problem = training(model.graph, model.loss, cluster_of(4, 1e-6))
    placement = GraphPipe().run(problem)
    assert side_by_side(problem, placement)
    if name != "dlrm":
        before = [
            inputs_before(problem, placement, stage) for stage in range(len(placement.stages) - 1)
        ]
        assert set(before) == {("input_ids",), ("pixel_values",)}, (
            "no stage of a tower waits for the other tower"
        )
    check_step(pools, model, problem, placement, "kfkb", tmp_path / "kfkb")


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_schedule(pools: Pools, tmp_path: Path, name: str, dynamo: bool) -> None:
    model = trained_export(pools, exported(name, dynamo, tmp_path))
    for devices in (4, 8):
        problem = training(model.graph, model.loss, cluster_of(devices, 1e-6))
        placement = GraphPipe().run(problem)
        assert side_by_side(problem, placement)
        for schedule in SCHEDULERS:
            check_step(
                pools, model, problem, placement, schedule, tmp_path / f"{devices}-{schedule}"
            )


def trained_export(pools: Pools, path: Path) -> Trained:
    """The export with its step on one device, as its file's weights and random data make it."""
    model = read_model(path, batch=SAMPLES)
    count = BATCH // SAMPLES
    return trained(
        pools, path.stem, model.graph, model.loss, path, batch_for(model.graph, count), count
    )


def inputs_before(problem: Problem, placement: Placement, stage: int) -> tuple[str, ...]:
    """The model's inputs that a stage, and all that it waits for, read."""
    graph = problem.graph
    given = {value.name for value in graph.inputs}
    waiting = [name for node in placement.stages[stage].nodes for name in graph.nodes[node].inputs]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        producer = graph.producer(name)
        if producer is not None:
            waiting += graph.nodes[producer].inputs
    return tuple(sorted(seen & given))
