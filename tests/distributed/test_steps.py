"""Several steps: parameters stay what one device's optimizer makes of them, on all ranks that hold
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe.backends.torch.verification import read_losses
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Schedule
from tests.distributed.support.builder import Builder, evaluate
from tests.distributed.support.halves import halved
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    batch_of,
    drawn_parameters,
    forwards_first,
    micro_batches_of,
    report_lines,
    schedule_of,
    write,
)

pytestmark = pytest.mark.distributed

STEPS = 4
OPTIMIZERS = [
    Optimizer("sgd", lr=0.05),
    Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=0.1),
    Optimizer("adamw", lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
]


def tied() -> tuple[Graph, str, Placement]:
    """A table that the first and the last stage use, two ranks sharing the batch of the stage
    between.
    """
    builder = Builder()
    table = builder.parameter((6, 4))
    hidden = builder.node("Gather", table, builder.input((4, 3), DType.INT64))
    hidden = builder.node("Tanh", builder.node("MatMul", hidden, builder.parameter((4, 4))))
    hidden = builder.node("Mul", hidden, builder.parameter((4,), trainable=False))
    loss = builder.mean_square(
        builder.node("MatMul", hidden, builder.node("Transpose", table, perm=(1, 0)))
    )
    graph = builder.graph(loss)
    batch = batch_axes_of(graph)
    splits = tuple((node, (Split(str(batch.axis(node)), 2),)) for node in (1, 2, 3))
    last = tuple(range(4, len(graph.nodes)))
    return (
        graph,
        loss,
        Placement(
            (Stage((0,), (0,), 4), Stage((1, 2, 3), (1, 2), 4, splits), Stage(last, (3,), 4))
        ),
    )


def expected_losses(
    graph: Graph,
    loss: str,
    folder: Path,
    batch: dict[str, np.ndarray],
    count: int,
    settings: Optimizer,
) -> list[float]:
    """The same steps in plain torch."""
    parameters = drawn_parameters(graph, folder)
    trained = [
        parameters[each.value.name].requires_grad_() for each in graph.parameters if each.trainable
    ]
    optimizer = (
        torch.optim.SGD(trained, settings.lr, settings.momentum, weight_decay=settings.weight_decay)
        if settings.name == "sgd"
        else torch.optim.AdamW(
            trained, settings.lr, settings.betas, settings.eps, settings.weight_decay
        )
    )
    losses = []
    for _ in range(STEPS):
        parts = [
            evaluate(graph, parameters | inputs)[loss]
            for inputs in micro_batches_of(graph, batch, count)
        ]
        total = torch.stack(parts).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
def test_losses_follow_those_of_one_device(
    pools: Pools, tmp_path: Path, settings: Optimizer
) -> None:
    graph, loss, placement = tied()
    schedule = schedule_of(graph, placement, 3)
    check(pools, tmp_path, (graph, loss, placement), schedule, settings)


@pytest.mark.parametrize("micro_batches", [1, 5, 6])
def test_two_pipelines_keep_their_copies_of_parameters_equal(
    pools: Pools, tmp_path: Path, micro_batches: int
) -> None:
    """A second pipeline the other way round, cut elsewhere: ranks 0 and 3 use the table in two
    stages each.
    """
    graph, loss, placement = tied()
    first = placement.stages[0].nodes + placement.stages[1].nodes
    second = placement.stages[2].nodes
    other = (Stage(first, (3,), 4, (), False, 1), Stage(second, (0,), 4, (), True, 1))
    placement = Placement(placement.stages + other)
    placement.verify(graph)
    schedule = forwards_first(graph, placement, micro_batches)
    check(pools, tmp_path, (graph, loss, placement), schedule, OPTIMIZERS[1])


def test_every_step_waits_for_every_message(pools: Pools, tmp_path: Path) -> None:
    """With `--blocking`, backwards in halves, and a rank that has nothing to do."""
    graph, loss, placement = tied()
    first, middle, last = placement.stages
    placement = Placement((first, Stage(middle.nodes, (1,), 4), last))
    schedule = halved(schedule_of(graph, placement, 4), 1)
    check(pools, tmp_path, (graph, loss, placement), schedule, OPTIMIZERS[0], "--blocking")


def check(
    pools: Pools,
    tmp_path: Path,
    placed: tuple[Graph, str, Placement],
    schedule: Schedule,
    settings: Optimizer,
    *options: str,
) -> None:
    graph, loss, placement = placed
    count = schedule.micro_batches
    folder = tmp_path / "program"
    write(graph, placement, schedule, loss, folder, optimizer=settings)
    batch = batch_of(graph, count)
    np.savez(tmp_path / "batch.npz", **batch)  # type: ignore[arg-type]
    report = tmp_path / "report.jsonl"
    arguments = (
        "--device",
        "cpu",
        "--data",
        tmp_path / "batch.npz",
        "--steps",
        STEPS,
        "--report",
        report,
        *options,
    )
    printed = pools.of(4).run(folder, *arguments)
    found = read_losses(report)
    np.testing.assert_allclose(
        found, expected_losses(graph, loss, folder, batch, count, settings), rtol=1e-9
    )
    assert found[-1] < found[0]
    assert [line["step"] for line in report_lines(report)] == list(range(STEPS))
    assert printed == [""] * 4, "what a report says is not printed"
