"""Every schedule that can be chosen runs on four ranks and computes what torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.schedule import StageGraph
from autopipe.passes.registry import scheduler_names
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    expected_step,
    run_step,
    write,
)
from tests.distributed.support.shapes import problem_of, scheduled, tied_chain

pytestmark = pytest.mark.distributed

RANKS = 4
LAYERS = 16


@pytest.mark.parametrize("micro_batches", [8, 5])
@pytest.mark.parametrize(
    "name", [name for name in scheduler_names() if name != "csv"]
)  # csv follows a file
def test_gradients_are_those_of_one_device(
    pools: Pools, tmp_path: Path, name: str, micro_batches: int
) -> None:
    """Five micro-batches, which come out even nowhere, with messages that are waited for where they
    are made.
    """
    graph, loss = tied_chain(LAYERS)
    problem = problem_of(graph, loss, micro_batches, RANKS)
    found = scheduled(name, problem)
    if found is None:
        assert micro_batches == 5, f"{name} takes none of the placements"
        return
    placement, schedule = found
    stages = StageGraph.of(problem, placement)
    schedule.verify(stages, train=True)
    assert simulate(schedule, stages.stage_devices, predict(problem, placement)).end > 0
    write(graph, placement, schedule, loss, tmp_path / "program")
    batch = batch_of(graph, micro_batches)
    expected = expected_step(graph, loss, tmp_path / "program", batch, micro_batches)
    options = ("--blocking",) if micro_batches == 5 else ()
    assert_equal_steps(run_step(pools, tmp_path / "program", batch, *options), expected, 1e-9)
