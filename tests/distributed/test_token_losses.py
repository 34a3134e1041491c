"""A loss divided by the step's counted labels: gradients are those of all labels of a step at
once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.training import Training
from autopipe.passes.frontend.token_loss import sum_loss_over_labels
from tests.distributed.support.builder import Builder
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    drawn_parameters,
    forwards_first,
    report_lines,
    schedule_of,
    write,
)

pytestmark = pytest.mark.distributed

SAMPLES = 4
MICRO_BATCHES = 4
CLASSES = 6
WIDTH = 5
STEPS = 3
IGNORED = -100
RATE = 0.5


def model() -> tuple[Graph, str]:
    builder = Builder()
    value = builder.input((SAMPLES, WIDTH))
    labels = builder.input((SAMPLES,), DType.INT64)
    hidden = builder.node("Tanh", builder.node("MatMul", value, builder.parameter((WIDTH, 4))))
    scores = builder.node("MatMul", hidden, builder.parameter((4, CLASSES)))
    loss = builder.node(
        "SoftmaxCrossEntropyLoss", scores, labels, ignore_index=IGNORED, reduction="mean"
    )
    return sum_loss_over_labels(builder.graph(loss), loss)


def batch() -> dict[str, np.ndarray]:
    """The first micro-batch has one label that counts, the second none, the others three and
    four.
    """
    drawn = np.random.default_rng(3)
    labels = drawn.integers(0, CLASSES, SAMPLES * MICRO_BATCHES)
    labels[1 : 2 * SAMPLES] = IGNORED
    labels[2 * SAMPLES + 2] = IGNORED
    return {"in0": drawn.normal(size=(len(labels), WIDTH)), "in1": labels}


def placements(graph: Graph) -> dict[str, Placement]:
    count = len(graph.nodes)
    batch_axis = batch_axes_of(graph)
    every = tuple(range(count))
    by_sample = tuple(
        (node, (Split(str(batch_axis.axis(node)), 2),)) for node in every if batch_axis.axis(node)
    )
    columns = ((2, (Split("n", 2),)),)
    rest = (count - 4, count - 3, count - 2, count - 1)
    return {
        "one": Placement((Stage(every, (0,), SAMPLES),)),
        "replicas": Placement((Stage(every, (0, 1), SAMPLES, by_sample),)),
        "columns": Placement((Stage(every, (0, 1), SAMPLES, columns),)),
        # The labels are counted on another rank than the loss is computed on.
        "apart": Placement(
            (Stage((0, 1, *rest), (0,), SAMPLES), Stage(every[2 : count - 4], (1,), SAMPLES))
        ),
        "two pipelines": Placement(
            (Stage(every, (0,), SAMPLES), Stage(every, (1,), SAMPLES, (), False, 1))
        ),
    }


@pytest.mark.parametrize("batches", [1, 2], ids=["one batch", "accumulated"])
def test_losses_are_those_of_all_labels_at_once(pools: Pools, tmp_path: Path, batches: int) -> None:
    graph, loss = model()
    data = batch()
    count = MICRO_BATCHES // batches
    for name, placement in placements(graph).items():
        program = tmp_path / name
        report = tmp_path / f"{name}.jsonl"
        order = forwards_first if name == "two pipelines" else schedule_of
        training = Training(gradient_accumulation_steps=batches)
        schedule = order(graph, placement, count)
        write(
            graph,
            placement,
            schedule,
            loss,
            program,
            optimizer=Optimizer("sgd", lr=RATE),
            training=training,
        )
        np.savez(tmp_path / "batch.npz", **data)  # type: ignore[arg-type]
        flags = (
            "--device",
            "cpu",
            "--data",
            tmp_path / "batch.npz",
            "--steps",
            STEPS,
            "--report",
            report,
        )
        pools.of(placement.devices).run(program, *flags)
        np.testing.assert_allclose(
            [line["loss"] for line in report_lines(report)],
            by_torch(graph, program, data),
            rtol=1e-9,
            err_msg=name,
        )


def by_torch(graph: Graph, program: Path, data: dict[str, np.ndarray]) -> list[float]:
    first, last = (each.requires_grad_() for each in drawn_parameters(graph, program).values())
    inputs, labels = (torch.from_numpy(each) for each in data.values())
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(torch.tanh(inputs @ first) @ last, labels, ignore_index=IGNORED)
        losses.append(loss.item())
        for each, gradient in zip(
            (first, last), torch.autograd.grad(loss, (first, last)), strict=True
        ):
            each.data -= RATE * gradient
    return losses


def test_other_losses_are_refused() -> None:
    builder = Builder()
    loss = builder.mean_square(
        builder.node("MatMul", builder.input((4, 3)), builder.parameter((3, 2)))
    )
    with pytest.raises(
        ConfigurationError,
        match=r"tokens requires a mean cross-entropy over labels, but the loss .* ReduceMean",
    ):
        sum_loss_over_labels(builder.graph(loss), loss)
