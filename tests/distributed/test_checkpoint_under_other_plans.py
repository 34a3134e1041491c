"""A run goes on under another plan, strategy, number of ranks and micro-batch: losses are an
undisturbed run's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

from autopipe.backends.torch.checkpoint import CheckpointReader, checkpoint_path, read_checkpoint
from autopipe.backends.torch.verification import read_losses
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.strategy import Pase
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import Step, schedule_of, write
from tests.distributed.support.strategies import random_placement
from tests.distributed.support.trained import DRAWN, Trained, problem_of
from tests.distributed.support.zoo import small_graph

pytestmark = pytest.mark.distributed

BATCH = 48
HALF = 5
STEPS = 10
TOLERANCE = 1e-5
ADAMW = Optimizer("adamw", lr=0.01, weight_decay=0.1)
MOMENTUM = Optimizer("sgd", lr=0.05, momentum=0.9)


def pipeline(model: Trained, devices: int) -> Placement:
    """As many stages as devices, one device each."""
    count = len(model.graph.nodes)
    cuts = [count * number // devices for number in range(devices + 1)]
    stages = (
        Stage(tuple(range(*cuts[each : each + 2])), (each,), model.samples)
        for each in range(devices)
    )
    return Placement(tuple(stages))


STRATEGIES: dict[str, Callable[[Trained, int], Placement]] = {
    "pipeline": pipeline,
    "data": lambda model, devices: DataParallel().run(problem_of(model, devices)),
    "pase": lambda model, devices: Pase().run(problem_of(model, devices)),
    "random": lambda model, devices: random_placement(
        Random(devices), model.graph, devices, model.samples
    ),
}
"""Random ones have one or two stages that share their nodes in any way: tensor and data parallel,
mixed.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run's plan is made from."""

    strategy: str
    devices: int
    micro_batches: int = 2
    batch: int = BATCH
    """Samples of a step."""

    def __str__(self) -> str:
        return f"{self.strategy}{self.devices}x{self.micro_batches}-{self.batch}"


ONE = Plan("pipeline", 1)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of a small model of the zoo under any plan."""

    pools: Pools
    folder: Path
    model: str
    optimizer: Optimizer

    def run(self, plan: Plan, name: str, *flags: object, steps: int = STEPS) -> list[float]:
        """The losses of a run that saves in folder `name`."""
        program = self.folder / str(plan)
        if not program.exists():
            graph, loss = small_graph(self.model, plan.batch // plan.micro_batches)
            model = Trained(
                self.model, graph, loss, Step(0.0, {}), Path(), None, plan.micro_batches
            )
            placement = STRATEGIES[plan.strategy](model, plan.devices)
            schedule = schedule_of(graph, placement, plan.micro_batches)
            write(graph, placement, schedule, loss, program, optimizer=self.optimizer)
        report = self.folder / f"{name}.jsonl"
        report.unlink(missing_ok=True)
        arguments = ("--device", "cpu", *DRAWN, "--report", report, "--steps", steps, *flags)
        self.pools.of(plan.devices).run(program, *arguments, "--checkpoint", self.folder / name)
        return read_losses(report)

    def go_on(self, plan: Plan, first: str, steps: int = STEPS) -> list[float]:
        """The losses from the middle on, under `plan`, after a run that saved in folder `first`."""
        name = f"{first}-{plan}"
        shutil.copytree(self.folder / first, self.folder / name)
        return self.run(plan, name, "--resume", steps=steps)

    def final(self, name: str) -> dict[str, bytes]:
        """Every number that the run that saved in folder `name` ended with, by tensor."""
        path = checkpoint_path(self.folder / name, STEPS)
        checkpoint = read_checkpoint(path)
        reader = CheckpointReader(path, checkpoint)
        return {
            f"{each.name}/{state}": reader.read(tensor).tobytes()
            for each in checkpoint.parameters
            for state, tensor in (("", each.value), *each.state)
        }


def check(runs: Runs, first: Plan, *later: Plan) -> None:
    """Half of the steps under one plan, the other half under each of the others and under the
    same.
    """
    alone = runs.run(ONE, "one")
    undisturbed = runs.run(first, "undisturbed")
    np.testing.assert_allclose(undisturbed, alone, rtol=TOLERANCE)
    half = runs.run(first, "half", steps=HALF)
    assert half + runs.go_on(first, "half") == undisturbed
    assert runs.final(f"half-{first}") == runs.final("undisturbed")
    for plan in later:
        np.testing.assert_allclose(
            runs.go_on(plan, "half"), alone[HALF:], rtol=TOLERANCE, err_msg=str(plan)
        )
        saved = read_checkpoint(checkpoint_path(runs.folder / f"half-{plan}", STEPS))
        assert saved.forwards == HALF * (first.micro_batches + plan.micro_batches)
    assert len(set(alone)) == STEPS


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_four_ranks_go_on_as_two_and_one(
    pools: Pools, tmp_path: Path, optimizer: Optimizer
) -> None:
    later = (Plan("data", 2), Plan("random", 4), Plan("pipeline", 2, 4), Plan("pipeline", 1, 1))
    check(Runs(pools, tmp_path, "gpt", optimizer), Plan("pase", 4), *later)


def test_another_batch_goes_on_at_the_next_sample(pools: Pools, tmp_path: Path) -> None:
    """Where nothing is learned, losses tell which samples a step has seen."""
    runs = Runs(pools, tmp_path, "rnnlm", Optimizer("sgd", lr=0.0))
    small = Plan("data", 2, 2, BATCH // 2)
    alone = runs.run(small, "alone", steps=6)
    large = runs.run(ONE, "large", steps=2)
    np.testing.assert_allclose(large, [sum(alone[:2]) / 2, sum(alone[2:4]) / 2], rtol=TOLERANCE)
    np.testing.assert_allclose(runs.go_on(small, "large", steps=4), alone[4:], rtol=TOLERANCE)
    saved = read_checkpoint(checkpoint_path(tmp_path / f"large-{small}", 4))
    assert (saved.step, saved.samples) == (4, 3 * BATCH)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("model", ["gpt", "rnnlm", "moe", "transformer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_from_each_strategy_to_any(
    pools: Pools, tmp_path: Path, strategy: str, model: str, optimizer: Optimizer
) -> None:
    sizes = ((2, 2), (4, 4), (8, 2))
    later = (
        Plan(other, devices, micro_batches)
        for other in STRATEGIES
        for devices, micro_batches in sizes
    )
    check(Runs(pools, tmp_path, model, optimizer), Plan(strategy, 4), *later)
