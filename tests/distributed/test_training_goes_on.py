"""Several steps under random strategies: losses follow one device's, and training goes on from a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from autopipe.backends.torch.verification import read_losses
from autopipe.ir.problem import Optimizer
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import one_device, schedule_of, write
from tests.distributed.support.strategies import random_placement
from tests.distributed.support.trained import DRAWN, MICRO_BATCHES
from tests.distributed.support.zoo import SAMPLES, small_graph

pytestmark = pytest.mark.distributed

STEPS = 4


@pytest.mark.parametrize("name", ["gpt", "rnnlm"])
def test_steps_before_and_after_a_checkpoint(pools: Pools, tmp_path: Path, name: str) -> None:
    graph, loss = small_graph(name)
    placement = random_placement(Random(name), graph, 4, SAMPLES)
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    optimizer = Optimizer("adamw", lr=0.01)
    write(graph, placement, schedule, loss, tmp_path / "ranks", optimizer=optimizer)
    write(
        graph,
        *one_device(graph, MICRO_BATCHES, True, SAMPLES),
        loss,
        tmp_path / "one",
        optimizer=optimizer,
    )

    def losses(folder: str, report: str, *flags: object) -> list[float]:
        size = 1 if folder == "one" else 4
        path = tmp_path / f"{report}.jsonl"
        pools.of(size).run(tmp_path / folder, "--device", "cpu", *DRAWN, "--report", path, *flags)
        return read_losses(path)

    together = losses("ranks", "together", "--steps", STEPS)
    kept = ("--checkpoint", tmp_path / "kept")
    apart = losses("ranks", "first", "--steps", STEPS // 2, *kept)
    apart += losses("ranks", "second", "--steps", STEPS, *kept, "--resume")
    assert apart == together
    np.testing.assert_allclose(together, losses("one", "alone", "--steps", STEPS), rtol=1e-5)
