"""The check of one random strategy of a model, told by a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.distributed.support.pool import Pools
from tests.distributed.support.strategies import random_placement, random_schedule
from tests.distributed.support.trained import Checked, Trained, check


def micro_batches_of(seed: int) -> int:
    """Two for every fourth strategy of a sweep, one for the others: what is exchanged decides how
    long they take.
    """
    return 1 if seed % 4 else 2


def check_random(pools: Pools, model: Trained, devices: int, seed: int, folder: Path) -> Checked:
    """Check the strategy and the schedule that a model, a number of devices and a seed stand for.

    With odd seeds the optimizer's state is in shares.
    """
    random = Random(f"{model.name} {devices} {seed}")
    placement = random_placement(random, model.graph, devices, model.samples)
    schedule = random_schedule(random, model.graph, placement, model.micro_batches)
    return check(pools, model, placement, folder, schedule, shard=seed % 2 == 1)
