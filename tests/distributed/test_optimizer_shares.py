"""The optimizer's state in shares (ZeRO-1): parameters and state are one device's, and so are
checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from autopipe.backends.torch.checkpoint import (
    CheckpointReader,
    check_checkpoint,
    checkpoint_path,
    read_checkpoint,
)
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Optimizer
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.builder import Builder
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    Step,
    assert_equal_steps,
    batch_of,
    expected_step,
    report_lines,
    run_step,
    schedule_of,
    write,
)

pytestmark = pytest.mark.distributed

SAMPLES = 12
MICRO_BATCHES = 2
STEPS = 6
TOLERANCE = 1e-5
OPTIMIZERS = {
    "momentum": Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=0.1, shard=True),
    "adamw": Optimizer("adamw", lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, shard=True),
}


def uneven() -> tuple[Graph, str]:
    """Parameters of 35, 7, 28, 4 and 1 numbers, a table that the first and the last node use, and a
    frozen one.
    """
    builder = Builder()
    table = builder.parameter((7, 5))
    hidden = builder.node("Gather", table, builder.input((SAMPLES, 3), DType.INT64))
    hidden = builder.node("Tanh", builder.node("MatMul", hidden, builder.parameter((5, 4))))
    hidden = builder.node(
        "Mul", builder.node("Mul", hidden, builder.parameter((4,))), builder.parameter(())
    )
    hidden = builder.node("Mul", hidden, builder.parameter((4,), trainable=False))
    hidden = builder.node("Tanh", builder.node("MatMul", hidden, builder.parameter((4, 7))))
    hidden = builder.node("Add", hidden, builder.parameter((7,)))
    loss = builder.mean_square(builder.node("MatMul", hidden, table))
    return builder.graph(loss), loss


def cut(graph: Graph, at: int, groups: list[tuple[int, ...]], columns: int = 1) -> Placement:
    """Stages from the start and from node `at`; replicas by samples, and the product of the first
    split by columns.
    """
    batch = batch_axes_of(graph)
    bounds = [0, at, len(graph.nodes)] if len(groups) > 1 else [0, len(graph.nodes)]
    stages = []
    for low, high, group in zip(bounds, bounds[1:], groups, strict=False):
        splits: list[tuple[int, tuple[Split, ...]]] = []
        for node in range(low, high):
            own = (
                [Split(str(batch.axis(node)), len(group) // columns)]
                if len(group) > columns
                else []
            )
            if columns > 1 and graph.nodes[node].op == "MatMul" and node < at:
                own.append(Split("n", columns))
            splits.append((node, tuple(own)))
        stages.append(
            Stage(
                tuple(range(low, high)), group, SAMPLES, tuple(each for each in splits if each[1])
            )
        )
    return Placement(tuple(stages))


PLACEMENTS = {
    "one": [(0,)],
    "data": [(0, 1, 2, 3)],
    "stages of replicas": [(0, 1), (2, 3)],
    "stages of three and one": [(0, 1, 2), (3,)],
}


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of the model under placements, with the optimizer's state in shares or not."""

    pools: Pools
    folder: Path
    optimizer: Optimizer

    def placement(self, name: str) -> tuple[Graph, str, Placement]:
        graph, loss = uneven()
        if name == "tensor and data":
            return graph, loss, cut(graph, 4, [(0, 1, 2, 3)], columns=2)
        return graph, loss, cut(graph, 4, PLACEMENTS[name])

    def run(
        self, name: str, shard: bool, saved: str, *flags: object, steps: int = STEPS
    ) -> list[float]:
        """The losses of a run under a placement that saves in folder `saved`."""
        graph, loss, placement = self.placement(name)
        program = self.folder / f"{name} {shard}"
        schedule = schedule_of(graph, placement, MICRO_BATCHES)
        if not program.exists():
            write(
                graph,
                placement,
                schedule,
                loss,
                program,
                optimizer=replace(self.optimizer, shard=shard),
            )
        report = self.folder / "report.jsonl"
        report.unlink(missing_ok=True)
        arguments = (
            "--device",
            "cpu",
            "--steps",
            steps,
            "--report",
            report,
            "--checkpoint",
            self.folder / saved,
        )
        self.pools.of(placement.devices).run(program, *arguments, *flags)
        lines = report_lines(report)
        moved = communication_bytes(
            graph, placement, MICRO_BATCHES, schedule.devices, loss, shard=shard
        )
        assert [line["communication_bytes"] for line in lines] == [moved] * len(lines)
        return [float(str(line["loss"])) for line in lines]

    def final(self, saved: str, step: int = STEPS) -> dict[str, np.ndarray]:
        """Every number that the run ended with, by tensor; each is stored once."""
        path = checkpoint_path(self.folder / saved, step)
        checkpoint = read_checkpoint(path)
        check_checkpoint(path, checkpoint)
        reader = CheckpointReader(path, checkpoint)
        return {
            f"{each.name}/{state}": reader.read(tensor)
            for each in checkpoint.parameters
            for state, tensor in (("", each.value), *each.state)
        }


def assert_equal_numbers(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = np.linalg.norm(found[name] - tensor) / max(float(np.linalg.norm(tensor)), 1e-6)
        assert error <= TOLERANCE, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_and_checkpoints_are_one_devices(
    pools: Pools, tmp_path: Path, optimizer: str
) -> None:
    runs = Runs(pools, tmp_path, OPTIMIZERS[optimizer])
    losses = runs.run("one", False, "alone")
    expected = runs.final("alone")
    assert len(expected) == {"momentum": 13, "adamw": 19}[optimizer], (
        "a frozen one, and six with their states"
    )
    for name in (*PLACEMENTS, "tensor and data"):
        shares = runs.run(name, True, name)
        np.testing.assert_allclose(shares, losses, rtol=TOLERANCE, err_msg=name)
        assert_equal_numbers(runs.final(name), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_runs_go_on_with_shares_and_without(pools: Pools, tmp_path: Path, optimizer: str) -> None:
    runs = Runs(pools, tmp_path, OPTIMIZERS[optimizer])
    runs.run("one", False, "alone")
    expected = runs.final("alone")
    ways = [
        ("data", True),
        ("one", False),
        ("stages of replicas", True),
        ("data", False),
        ("tensor and data", True),
    ]
    for number, (name, shard) in enumerate(ways, 1):  # Each goes on from the one before.
        runs.run(name, shard, "kept", *(["--resume"] if number > 1 else []), steps=number)
    runs.run("stages of three and one", True, "kept", "--resume", steps=STEPS)
    assert_equal_numbers(runs.final("kept"), expected)


@pytest.mark.parametrize("name", ["stages of replicas", "tensor and data"])
def test_gradients_are_recorded_whole(pools: Pools, tmp_path: Path, name: str) -> None:
    graph, loss, placement = Runs(pools, tmp_path, OPTIMIZERS["adamw"]).placement(name)
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    write(graph, placement, schedule, loss, tmp_path / "program", optimizer=OPTIMIZERS["adamw"])
    batch = batch_of(graph, MICRO_BATCHES)
    found: Step = run_step(pools, tmp_path / "program", batch)
    assert_equal_steps(
        found, expected_step(graph, loss, tmp_path / "program", batch, MICRO_BATCHES), TOLERANCE
    )
