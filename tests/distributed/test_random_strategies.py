"""Any executable strategy of every model of the zoo computes what one device does, and exchanges
what is predicted.

`./test -m sweep` draws fifty strategies a model on four and on eight ranks, and some on three and
six.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.support.pool import Pools
from tests.distributed.support.random_checks import check_random, micro_batches_of
from tests.distributed.support.zoo import SIZES, SmallModels

SMALLEST = [name for name in SIZES if name != "inceptionv3"]
SWEPT = ((4, 50), (8, 50), (6, 5), (3, 5))
"""Ranks, and strategies drawn on them."""


@pytest.mark.distributed
@pytest.mark.parametrize("name", SMALLEST)
def test_a_strategy_on_four_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    check_random(pools, small_models.of(name), 4, 0, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mmt", "moe", "wide-resnet"])
def test_a_strategy_with_the_optimizers_state_in_shares(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    check_random(pools, small_models.of(name), 4, 1, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["moe", "rnnlm"])
def test_a_strategy_on_eight_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    check_random(pools, small_models.of(name), 8, 0, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("devices", "count"), SWEPT)
@pytest.mark.parametrize("name", SIZES)
def test_many_strategies(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, devices: int, count: int
) -> None:
    for seed in range(count):
        model = small_models.of(name, micro_batches=micro_batches_of(seed))
        check_random(pools, model, devices, seed, tmp_path / str(seed))
