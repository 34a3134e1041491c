"""Training in fp16: the loss is scaled, and an overflow on one rank skips the step on all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

from autopipe.backends.torch.checkpoint import CheckpointReader, checkpoint_path, read_checkpoint
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Optimizer
from tests.distributed.support.builder import Builder
from tests.distributed.support.halves import halved
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    expected_step,
    largest_difference,
    report_lines,
    run_step,
    schedule_of,
    write,
)

pytestmark = pytest.mark.distributed

MICRO_BATCHES = 3
SAMPLES = 4
LIMIT = 3e-3
"""Six roundings to 11 bits, forwards and backwards."""
TOO_LARGE = 2.0**40
STEPS = 32
OPTIMIZERS = {
    "momentum": Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": Optimizer("adamw", lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "adamw in shares": Optimizer(
        "adamw", lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, shard=True
    ),
}


def layered(factor: float = 1.0) -> tuple[Graph, str]:
    """Three products, whose loss is `factor` times a mean square."""
    builder = Builder(dtype=DType.FLOAT32)
    value = builder.input((SAMPLES, 4))
    for _ in range(3):
        value = builder.node("Tanh", builder.node("MatMul", value, builder.parameter((4, 4))))
    loss = builder.node("Mul", builder.mean_square(value), builder.constant(factor, DType.FLOAT32))
    return builder.graph(loss), loss


def placed(graph: Graph, recompute: bool = False) -> Placement:
    """A stage of one rank, of two replicas, and of one more."""
    batch = batch_axes_of(graph)
    stages = []
    for nodes, group in (
        (range(2), (0,)),
        (range(2, 4), (1, 2)),
        (range(4, len(graph.nodes)), (3,)),
    ):
        splits = tuple(
            (node, (Split(str(batch.axis(node)), 2),)) for node in nodes if len(group) > 1
        )
        stages.append(Stage(tuple(nodes), group, SAMPLES, splits, recompute))
    return Placement(tuple(stages))


@pytest.mark.parametrize("how", ["whole", "recomputed", "in halves", "state in shares"])
def test_gradients_too_small_for_fp16_are_those_of_one_device(
    pools: Pools, tmp_path: Path, how: str
) -> None:
    """A loss so small that its gradients are zero in fp16, unless it is scaled."""
    graph, loss = layered(2.0**-16)
    placement = placed(graph, recompute=how == "recomputed")
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    if how == "in halves":
        schedule = halved(schedule, 1)
    batch = batch_of(graph, MICRO_BATCHES, seed=1)
    differences = {}
    for scale in (1.0, 2.0**16):
        folder = tmp_path / f"program {scale:g}"
        optimizer = Optimizer(shard=how == "state in shares", loss_scale=scale)
        write(graph, placement, schedule, loss, folder, "fp16", optimizer)
        found = run_step(pools, folder, batch)
        differences[scale] = largest_difference(
            found, expected_step(graph, loss, folder, batch, MICRO_BATCHES)
        ).relative
    assert differences[2.0**16] < LIMIT < 0.1 < differences[1.0]


def test_what_is_verified_is_a_step_that_does_not_overflow(pools: Pools, tmp_path: Path) -> None:
    graph, loss = layered()
    placement = placed(graph)
    folder = tmp_path / "program"
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    write(graph, placement, schedule, loss, folder, "fp16", Optimizer(loss_scale=TOO_LARGE))
    batch = batch_of(graph, MICRO_BATCHES)
    found = run_step(pools, folder, batch)
    assert_equal_steps(found, expected_step(graph, loss, folder, batch, MICRO_BATCHES), LIMIT)


@dataclass(frozen=True, slots=True)
class Runs:
    pools: Pools
    folder: Path
    optimizer: Optimizer

    def run(self, name: str, scale: float, steps: int, *flags: object) -> list[dict[str, object]]:
        """The report of steps on one batch, which save at their end in the folder `name`."""
        graph, loss = layered()
        placement = placed(graph)
        program = self.folder / f"program {scale:g}"
        schedule = schedule_of(graph, placement, MICRO_BATCHES)
        if not program.exists():
            write(
                graph,
                placement,
                schedule,
                loss,
                program,
                "fp16",
                replace(self.optimizer, loss_scale=scale),
            )
        np.savez(self.folder / "batch.npz", **batch_of(graph, MICRO_BATCHES))  # type: ignore[arg-type]
        report = self.folder / "report.jsonl"
        report.unlink(missing_ok=True)
        data = ("--data", self.folder / "batch.npz", "--checkpoint", self.folder / name)
        arguments = ("--device", "cpu", "--steps", steps, "--report", report, *data)
        self.pools.of(placement.devices).run(program, *arguments, *flags)
        return report_lines(report)

    def final(self, name: str, step: int) -> dict[str, object]:
        """All numbers, counters and the scale of a checkpoint, by name."""
        path = checkpoint_path(self.folder / name, step)
        checkpoint = read_checkpoint(path)
        reader = CheckpointReader(path, checkpoint)
        found: dict[str, object] = {"loss scale": checkpoint.loss_scale}
        for each in checkpoint.parameters:
            found |= {f"{each.name} {counter}": value for counter, value in each.scalars}
            for state, tensor in (("", each.value), *each.state):
                found[f"{each.name} {state}"] = reader.read(tensor).tobytes()
        return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_that_overflow_leave_everything_where_it_was(
    pools: Pools, tmp_path: Path, optimizer: str
) -> None:
    """From a scale that is too large, a run halves it and moves nothing until nothing overflows.
    From there on it is, to the bit, a run that started with that scale: parameters, the optimizer's
    state and its number of steps.
    """
    runs = Runs(pools, tmp_path, OPTIMIZERS[optimizer])
    lines = runs.run("too large", TOO_LARGE, STEPS)
    skipped = sum(bool(line["skipped"]) for line in lines)
    assert 8 < skipped < STEPS - 4
    assert [line["skipped"] for line in lines] == [True] * skipped + [False] * (STEPS - skipped)
    assert [line["loss_scale"] for line in lines] == [
        TOO_LARGE / 2 ** min(step, skipped) for step in range(STEPS)
    ]
    losses = [line["loss"] for line in lines]
    assert len(set(losses[: skipped + 1])) == 1
    fits = TOO_LARGE / 2**skipped
    straight = runs.run("fits", fits, STEPS - skipped)
    assert [line["loss"] for line in straight] == losses[skipped:]
    assert not any(line["skipped"] for line in straight)
    assert runs.final("too large", STEPS) == runs.final("fits", STEPS - skipped)


def test_a_run_goes_on_at_the_scale_of_its_checkpoint(pools: Pools, tmp_path: Path) -> None:
    """Between two skipped steps, and between two that are not."""
    runs = Runs(pools, tmp_path, OPTIMIZERS["adamw"])
    whole = runs.run("at once", TOO_LARGE, STEPS)
    parts = runs.run("in parts", TOO_LARGE, 5)
    parts += runs.run("in parts", TOO_LARGE, STEPS - 3, "--resume")
    parts += runs.run("in parts", TOO_LARGE, STEPS, "--resume")
    told = ("step", "loss", "loss_scale", "skipped")
    assert [[line[name] for name in told] for line in parts] == [
        [line[name] for name in told] for line in whole
    ]
    assert runs.final("in parts", STEPS) == runs.final("at once", STEPS)


ONE_OVERFLOWS = """
import torch
from autopipe.backends.torch.runtime.step.precision import LossScaler
from autopipe.backends.torch.runtime.communication.transport import Transport

transport = Transport("cpu")
scaler = LossScaler(8.0, transport)
for bad in (None, 2, 0, None):
    weights = [torch.ones(2), torch.ones(3, dtype=torch.float64)] if transport.rank < 2 else [torch.ones(1)]
    weights = weights if transport.rank != 1 else []  # A rank may have nothing to update.
    for weight in weights:
        weight.grad = torch.full_like(weight, 4.0)
    if bad == transport.rank:
        weights[0].grad[0] = float("nan")
    scaler.unscale(weights)
    if weights:
        scaler.step_optimizer(torch.optim.SGD(weights, lr=1.0))
    scaler.end_step()
    print([weight.tolist() for weight in weights], scaler.outcome.tolist(), scaler.state())
"""


def test_an_overflow_on_one_rank_skips_the_step_on_all(pools: Pools, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank:03d}.py").write_text(ONE_OVERFLOWS, encoding="utf-8")
    printed = [text.splitlines() for text in pools.of(3).run(tmp_path)]
    held = ["{0}, {0}], [{0}, {0}, {0}", None, "{0}"]
    for rank, lines in enumerate(printed):
        form = held[rank]
        kept, moved = (
            ("[]", "[]")
            if form is None
            else (f"[[{form.format(number)}]]" for number in (1.0, 0.5))
        )
        assert lines == [
            f"{moved} [8.0, 0.0] (8.0, 1)",
            f"{kept} [8.0, 1.0] (4.0, 0)",
            f"{kept} [4.0, 1.0] (2.0, 0)",
            f"{kept.replace('1.0', '-1.0')} [2.0, 0.0] (2.0, 1)",
        ]


@pytest.mark.parametrize(
    "plan",
    [
        ("--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "strategy.tensor=2", "--schedule", "zb_h1"),
        pytest.param(
            ("--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "strategy.data=2",
             "--set", "recompute=full", "--set", "optimizer.name=adamw", "--set", "optimizer.zero_stage=1",
             "--schedule", "1f1b"),
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["tensor parallel in halves", "replicas recomputed in shares"],
)  # fmt: skip
def test_verify_finds_a_transformer_in_fp16_equal(
    here: None, tmp_path: Path, plan: tuple[str, ...]
) -> None:
    model = tmp_path / "gpt.onnx"
    sizes = {
        "layers": "2",
        "hidden": "32",
        "heads": "4",
        "sequence": "16",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", sizes)).save(model)
    words = [
        "plan",
        str(model),
        "--gpus",
        "4",
        "--cluster",
        "cpu-local",
        "--batch-size",
        "16",
        "--micro-batches",
        "4",
    ]
    assert main([*words, "--set", "precision=fp16", *plan, "-q", "-o", str(tmp_path / "plan")]) == 0
    assert main(["codegen", str(tmp_path / "plan"), "-q"]) == 0
    assert main(["verify", str(tmp_path / "plan" / "program"), "--device", "cpu", "-q"]) == 0


HALF = """<ir_version: 9, opset_import: ["" : 18]>
half (float16[N, 4] x) => (float16 loss)
{
    a = MatMul(x, first)
    b = Tanh(a)
    c = MatMul(b, last)
    square = Mul(c, c)
    loss = ReduceMean <keepdims = 0> (square)
}
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("asked", [None, 1e-3])
def test_weights_in_float16_are_trained_with_a_denominator_they_can_hold(
    tmp_path: Path, asked: float | None
) -> None:
    model = onnx.parser.parse_model(HALF)
    weights = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float16)
    model.graph.initializer.extend(map(onnx.numpy_helper.from_array, weights, ("first", "last")))
    onnx.save(model, tmp_path / "half.onnx")
    words = [
        "--gpus",
        "2",
        "--cluster",
        "cpu-local",
        "--strategy",
        "data_parallel",
        "--batch-size",
        "8",
    ]
    words += [
        "-o",
        str(tmp_path / "plan"),
        *(() if asked is None else ("--set", f"optimizer.eps={asked}")),
    ]
    assert main(["plan", str(tmp_path / "half.onnx"), *words]) == 0
    program = tmp_path / "plan" / "program"
    assert main(["codegen", str(tmp_path / "plan")]) == 0
    assert main(["launch", str(program), "--device", "cpu", "--steps", "4"]) == 0
    assert read_manifest(program).optimizer["eps"] == (asked or 1e-4)
