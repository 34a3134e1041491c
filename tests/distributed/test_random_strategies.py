"""Any executable strategy of every model of the zoo computes what one device does, and exchanges what is predicted.

`./test -m sweep` draws fifty strategies a model on four ranks, and some on three, six and eight.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.pool import Pools
from tests.distributed.running import assert_equal_steps, run_step, schedule_of, write
from tests.distributed.strategies import random_placement
from tests.distributed.zoo import DRAWN, MICRO_BATCHES, SAMPLES, SIZES, SmallModel, SmallModels

TOLERANCE = 1e-5
FEW = 2
SWEPT = ((4, 50), (8, 10), (6, 5), (3, 5))
"""Ranks, and strategies drawn on them."""


@pytest.mark.distributed
@pytest.mark.parametrize("name", SIZES)
def test_strategies_on_four_ranks(pools: Pools, small_models: SmallModels, tmp_path: Path, name: str) -> None:
    for seed in range(FEW):
        check(pools, small_models.of(name), 4, seed, tmp_path / str(seed))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["moe", "rnnlm"])
def test_strategies_on_eight_ranks(pools: Pools, small_models: SmallModels, tmp_path: Path, name: str) -> None:
    check(pools, small_models.of(name), 8, 0, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("devices", "count"), SWEPT)
@pytest.mark.parametrize("name", SIZES)
def test_many_strategies(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, devices: int, count: int
) -> None:
    for seed in range(count):
        check(pools, small_models.of(name), devices, seed, tmp_path / str(seed))


def check(pools: Pools, model: SmallModel, devices: int, seed: int, folder: Path) -> None:
    """Draw a strategy and compare its step with one device's, and the bytes it moves with those predicted."""
    placement = random_placement(Random(f"{model.name} {devices} {seed}"), model.graph, devices, SAMPLES)
    schedule = schedule_of(model.graph, placement, MICRO_BATCHES)
    folder.mkdir(exist_ok=True)
    write(model.graph, placement, schedule, model.loss, folder / "program")
    found = run_step(pools, folder / "program", None, *DRAWN)
    assert_equal_steps(found, model.step, TOLERANCE)
    assert found.moved == communication_bytes(model.graph, placement, MICRO_BATCHES, schedule.devices, model.loss), (
        f"strategy {seed}"
    )
