"""Small models of the zoo in stages of any micro-batches on any groups of four ranks, any nodes
split, in any order.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.distributed.support.drawing_sizes import unequal_placement, unequal_schedule
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import MICRO_BATCHES, check
from tests.distributed.support.zoo import SmallModels

pytestmark = pytest.mark.distributed

MODELS = ("two-branch", "mmt", "dlrm", "candle-uno", "gpt", "moe")


@pytest.mark.parametrize("name", MODELS[:4])
def test_stages_of_any_micro_batches(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    check_drawn(pools, small_models, tmp_path, name, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("name", MODELS)
def test_many_more(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, seed: int
) -> None:
    check_drawn(pools, small_models, tmp_path, name, seed)


def check_drawn(
    pools: Pools, small_models: SmallModels, folder: Path, name: str, seed: int
) -> None:
    """Loss, gradients and bytes of a step of a placement drawn with this seed."""
    model = small_models.of(name, 4)
    random = Random(f"{name} {seed}")
    placement = unequal_placement(random, model.graph, 4, (1, 2, 4))
    check(
        pools,
        model,
        placement,
        folder,
        unequal_schedule(random, model.graph, placement, MICRO_BATCHES, True),
    )
