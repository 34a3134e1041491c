"""What strategies choose for the models of the zoo computes what one device does, and exchanges what is predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.passes.base import Strategy
from autopipe.passes.lower.traffic import communication_bytes
from autopipe.passes.placement.expert.strategy import Expert
from autopipe.passes.placement.pase.strategy import Pase
from tests.distributed.pool import Pools
from tests.distributed.running import assert_equal_steps, run_step, schedule_of, write
from tests.distributed.zoo import DRAWN, MICRO_BATCHES, SAMPLES, SIZES, SmallModel, SmallModels, small_problem

TOLERANCE = 1e-5

CHOOSING: dict[str, Strategy] = {"expert": Expert(), "pase": Pase()}


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", CHOOSING)
@pytest.mark.parametrize("name", SIZES)
def test_on_four_ranks(pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, strategy: str) -> None:
    check(pools, small_models.of(name), CHOOSING[strategy], 4, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", CHOOSING)
@pytest.mark.parametrize("name", SIZES)
def test_on_eight_ranks(pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, strategy: str) -> None:
    check(pools, small_models.of(name, 2 * SAMPLES), CHOOSING[strategy], 8, tmp_path)


def check(pools: Pools, model: SmallModel, strategy: Strategy, devices: int, folder: Path) -> None:
    """Run what the strategy chooses on so many devices."""
    problem = small_problem(model, devices)
    strategy.requires(problem)
    placement = strategy.run(problem)
    placement.verify(model.graph)
    schedule = schedule_of(model.graph, placement, MICRO_BATCHES)
    write(model.graph, placement, schedule, model.loss, folder / "program")
    found = run_step(pools, folder / "program", None, *DRAWN)
    assert_equal_steps(found, model.step, TOLERANCE)
    assert found.moved == communication_bytes(model.graph, placement, MICRO_BATCHES, schedule.devices, model.loss)
