"""Dropout drops the same elements whatever the plan: a step is one device's, and run again the same
to the bit.

`./test -m sweep tests/distributed/test_dropout.py` runs twenty plans of one model on one to eight
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from autopipe.backends.torch.verification import read_losses
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Schedule
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from autopipe.passes.placement.grid import Grid
from autopipe.passes.placement.handcrafted import Handcrafted
from autopipe.passes.placement.pase.strategy import BreadthFirst, Mcmc, Pase
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.placement.piper.strategy import Piper
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.registry import Strategy
from tests.distributed.support.dropping import graph_with_batch_statistics, graph_with_dropout
from tests.distributed.support.halves import halved
from tests.distributed.support.pool import Pools
from tests.distributed.support.portions import random_order
from tests.distributed.support.running import one_device, run_step, schedule_of, stage_graph, write
from tests.distributed.support.strategies import random_placement
from tests.distributed.support.trained import DRAWN, Trained, check, problem_of, trained

pytestmark = pytest.mark.distributed

SAMPLES = 12
MICRO_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement by a strategy, or drawn by a seed, and what is done with it."""

    strategy: Strategy | int
    devices: int
    recompute: bool = False
    sizes: tuple[int, ...] = ()
    """Samples of each stage's own micro-batches, in turn, where they are not the program's."""
    halves: bool = False
    shard: bool = False

    def placement(self, model: Trained) -> Placement:
        """Where the model's nodes go."""
        if isinstance(self.strategy, int):
            random = Random(self.strategy)
            found = random_placement(random, model.graph, self.devices, model.samples)
        else:
            problem = problem_of(model, self.devices)
            self.strategy.requires(problem)
            found = self.strategy.run(problem)
        sizes = self.sizes or (model.samples,)
        stages = tuple(
            replace(stage, recompute=self.recompute, micro_batch_size=sizes[number % len(sizes)])
            for number, stage in enumerate(found.stages)
        )
        return replace(found, stages=stages)

    def schedule(self, model: Trained, placement: Placement) -> Schedule:
        """An order of its tasks."""
        if self.sizes:
            return random_order(
                Random(self.devices), stage_graph(model.graph, placement), model.micro_batches
            )
        found = schedule_of(model.graph, placement, model.micro_batches)
        return halved(found, 1) if self.halves else found


FEW: Mapping[str, Plan] = {
    "tensor": Plan(Handcrafted(tensor=2), 2),
    "any axis, recomputed": Plan(3, 4, recompute=True),
    "own micro-batches": Plan(Grid(pipeline=2, data=2), 4, sizes=(6, 2)),
}
TWENTY: Mapping[str, Plan] = {
    "one device, recomputed": Plan(DataParallel(), 1, recompute=True),
    "breadth_first": Plan(BreadthFirst(), 2),
    "data": Plan(DataParallel(), 4),
    "data, recomputed, shares": Plan(DataParallel(), 3, recompute=True, shard=True),
    "handcrafted": Plan(Handcrafted(), 8),
    "expert, recomputed": Plan(Handcrafted(tensor=6), 6, recompute=True),
    "graphpipe": Plan(GraphPipe(), 8),
    "graphpipe, own micro-batches, recomputed": Plan(GraphPipe(), 8, recompute=True, sizes=(4, 12)),
    "grid": Plan(Grid(pipeline=2, tensor=2, data=2), 8, shard=True),
    "grid, waves, recomputed": Plan(
        Grid(pipeline=4, stages_per_rank=2, style="v"), 4, recompute=True
    ),
    "mcmc": Plan(Mcmc(), 8),
    "pase": Plan(Pase(), 4),
    "pase, recomputed": Plan(Pase(), 8, recompute=True),
    "pipedream": Plan(PipeDream(), 8),
    "piper, recomputed": Plan(Piper(), 8, recompute=True),
    "tepdist": Plan(TePDist(), 4, halves=True),
    "tepdist in two stages, recomputed": Plan(TePDist(stages=2), 6, recompute=True),
    "tessel_shapes": Plan(TesselShapes(), 5, halves=True),
    "tessel_shapes, recomputed": Plan(TesselShapes(), 8, recompute=True),
    "drawn": Plan(7, 6, halves=True),
}


@pytest.fixture(scope="module")
def model(pools: Pools) -> Trained:
    graph, loss = graph_with_dropout(SAMPLES)
    return trained(pools, "gpt with dropout", graph, loss, micro_batches=MICRO_BATCHES)


@pytest.mark.parametrize("name", FEW)
def test_a_plan_drops_what_one_device_drops(
    pools: Pools, model: Trained, tmp_path: Path, name: str
) -> None:
    follow(pools, model, FEW[name], tmp_path)


RESNET: Mapping[str, Plan] = {
    **{name: plan for name, plan in TWENTY.items() if not plan.sizes},
    "handcrafted": Plan(Handcrafted(), 6),
    "pipeline and data": Plan(Grid(pipeline=2, data=2), 4, shard=True),
    "drawn once more": Plan(8, 4, recompute=True),
}
"""Of a model whose samples mix, every stage has the program's micro-batches."""


@pytest.fixture(scope="module")
def resnet(pools: Pools) -> Trained:
    graph, loss = graph_with_batch_statistics(SAMPLES)
    return trained(pools, "resnet with batch statistics", graph, loss, micro_batches=MICRO_BATCHES)


@pytest.mark.parametrize("name", ["data, recomputed, shares"])
def test_batch_statistics_are_those_of_the_micro_batch(
    pools: Pools, resnet: Trained, tmp_path: Path, name: str
) -> None:
    follow(pools, resnet, RESNET[name], tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", RESNET)
def test_twenty_plans_with_batch_statistics(
    pools: Pools, resnet: Trained, tmp_path: Path, name: str
) -> None:
    follow(pools, resnet, RESNET[name], tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", TWENTY)
def test_twenty_plans(pools: Pools, model: Trained, tmp_path: Path, name: str) -> None:
    follow(pools, model, TWENTY[name], tmp_path)


def test_steps_differ_and_go_on_from_a_checkpoint_under_any_plan(
    pools: Pools, tmp_path: Path
) -> None:
    graph, loss = graph_with_dropout(SAMPLES)
    still = Optimizer("sgd", lr=0.0)
    data = tmp_path / "data.npz"
    # One batch again and again.
    np.savez(data, tokens=np.full((96, 12), 3), labels=np.full((96, 12), 5))
    placement = random_placement(Random(5), graph, 2, SAMPLES)
    write(
        graph,
        placement,
        schedule_of(graph, placement, MICRO_BATCHES),
        loss,
        tmp_path / "2",
        optimizer=still,
    )
    write(
        graph,
        *one_device(graph, MICRO_BATCHES, True, SAMPLES),
        loss,
        tmp_path / "1",
        optimizer=still,
    )

    def losses(ranks: int, *flags: object) -> list[float]:
        report = tmp_path / "report.jsonl"
        report.unlink(missing_ok=True)
        flags = ("--device", "cpu", "--data", data, "--report", report, *flags)
        pools.of(ranks).run(tmp_path / str(ranks), *flags)
        return read_losses(report)

    kept = ("--checkpoint", tmp_path / "kept")
    unbroken = losses(2, "--steps", 4, "--seed", 7)
    assert len(set(unbroken)) == 4
    assert losses(2, "--steps", 4, "--seed", 7) == unbroken
    assert not set(unbroken) & set(losses(2, "--steps", 4, "--seed", 8))
    assert losses(2, "--steps", 2, "--seed", 7, *kept) == unbroken[:2]
    np.testing.assert_allclose(losses(1, "--steps", 4, *kept, "--resume"), unbroken[2:], rtol=1e-6)


def follow(pools: Pools, model: Trained, plan: Plan, folder: Path) -> None:
    """Run a plan's step, which must be one device's, and once more."""
    placement = plan.placement(model)
    check(pools, model, placement, folder, plan.schedule(model, placement), plan.shard)
    first, second = (run_step(pools, folder / "program", None, *DRAWN) for _ in range(2))
    assert first.loss == second.loss
    for index, gradient in first.gradients.items():
        np.testing.assert_array_equal(gradient, second.gradients[index])
