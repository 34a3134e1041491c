"""Steps of captured stages are equal to eager steps, bit for bit: losses, parameters and running
statistics.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.rank import Rank
from autopipe.backends.torch.runtime.step.cuda_graphs import StageGraphs
from autopipe.backends.torch.verification import read_outputs
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Schedule
from autopipe.ir.training import LRScheduler, Training
from autopipe.passes.frontend import read_model
from autopipe.passes.placement.grid import Grid
from tests.backends.torch.runtime.recorded_graphs import Device, install
from tests.distributed.support.alone import as_rank
from tests.distributed.support.dropping import graph_with_batch_statistics, graph_with_dropout
from tests.distributed.support.halves import halved
from tests.distributed.support.pool import Pool
from tests.distributed.support.running import Step, one_device, report_lines, schedule_of, write
from tests.distributed.support.trained import Trained, problem_of
from tests.distributed.support.zoo import small_graph

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SAMPLES = 2
MICRO_BATCHES = 3
STEPS = 3
PLAIN = Training()
CONSTANT = LRScheduler()
ADAMW = Optimizer("adamw", lr=0.01)

MODELS: dict[str, Callable[[], tuple[Graph, str]]] = {
    "gpt with dropout": lambda: graph_with_dropout(SAMPLES),
    "resnet with batch statistics": lambda: graph_with_batch_statistics(SAMPLES),
    **{
        name: (lambda name=name: small_graph(name, SAMPLES))  # type: ignore[misc]
        for name in (
            "bert",
            "llama",
            "mt5",
            "dlrm",
            "rnnlm",
            "transformer",
            "candle-uno",
            "two-branch",
            "moe",
        )
    },
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is trained on one rank."""

    precision: str = "fp32"
    stages: int = 1
    recompute: bool = False
    halves: bool = False
    order: str = "1f1b"
    training: Training = PLAIN
    lr_scheduler: LRScheduler = CONSTANT
    optimizer: Optimizer = ADAMW

    def write(self, graph: Graph, loss: str, folder: Path) -> None:
        """Write the program: nodes in stages of about equal length, in order."""
        count = len(graph.nodes)
        cuts = [count * number // self.stages for number in range(self.stages + 1)]
        stages = [
            Stage(tuple(range(first, last)), (0,), SAMPLES, recompute=self.recompute)
            for first, last in pairwise(cuts)
        ]
        placement = Placement(tuple(stages))
        schedule: Schedule = schedule_of(graph, placement, MICRO_BATCHES, self.order)
        if self.halves:
            schedule = halved(schedule, 1)
        settings = {"lr_scheduler": self.lr_scheduler, "training": self.training}
        write(graph, placement, schedule, loss, folder, self.precision, self.optimizer, **settings)  # type: ignore[arg-type]


PLANS = {
    "plain": Plan(),
    "recomputed": Plan(recompute=True, order="gpipe"),
    "accumulated": Plan(
        training=Training(gradient_accumulation_steps=2),
        optimizer=Optimizer("sgd", lr=0.05, momentum=0.9),
    ),
    "scaled": Plan("fp16", optimizer=Optimizer("adamw", lr=0.01, loss_scale=2.0**16)),
    "all, two stages, halves": Plan(
        "fp16",
        2,
        recompute=True,
        halves=True,
        order="gpipe",
        training=Training(gradient_accumulation_steps=2, max_norm=0.1),
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a run."""

    losses: list[object]
    tensors: dict[str, torch.Tensor]
    notes: list[str]


def rank_of(folder: Path, *flags: object) -> Rank:
    """Run the only rank of a program in this process. Return it as it is at the end."""
    with as_rank(folder, 0, "--device", "cpu", *flags):
        rank = runpy.run_path(str(folder / "rank_000.py"), run_name="__main__")["rank"]
    assert isinstance(rank, Rank)
    return rank


def run(folder: Path, *flags: object) -> Run:
    """Run the only rank of a program in this process, on random data."""
    report = folder.with_suffix(".jsonl")
    report.unlink(missing_ok=True)
    rank = rank_of(folder, "--steps", STEPS, "--report", report, *flags)
    tensors = {
        f"parameter {index}": tensor.detach().clone() for index, tensor in rank.parameters.items()
    }
    if rank.update.optimizer is not None:
        for number, state in enumerate(rank.update.optimizer.state.values()):
            tensors |= {
                f"{name} {number}": each
                for name, each in state.items()
                if isinstance(each, torch.Tensor)
            }
    records = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    notes = [record["note"] for record in records if "note" in record]
    return Run([line["loss"] for line in report_lines(report)], tensors, notes)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Its LSTM kernel does not take fp16 on every CPU."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


def all_captured(stages: int) -> str:
    """Return the note of a program whose stages are all captured."""
    return (
        f"CUDA graphs: {stages} of {stages} {'stage' if stages == 1 else 'stages'} captured, and "
        "the update"
    )


UNDER_EVERY_PLAN = {"gpt with dropout", "resnet with batch statistics"}
UNDER_EVERY_MODEL = {"plain", "all, two stages, halves"}
"""Outside of sweeps, a model runs under a plan if the model or the plan is in these sets."""
CASES = [
    pytest.param(
        *(model, plan),
        marks=(
            [] if model in UNDER_EVERY_PLAN or plan in UNDER_EVERY_MODEL else [pytest.mark.sweep]
        ),
        id=f"{model}-{plan}",
    )
    for model in MODELS
    for plan in PLANS
]


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_captured_steps_are_equal_to_eager_steps(
    model: str, plan: str, device: Device, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "program"
    PLANS[plan].write(*MODELS[model](), folder)
    if model == "rnnlm" and PLANS[plan].precision == "fp16":
        request.getfixturevalue("without_onednn")
    eager = run(folder, "--no-cuda-graphs")
    assert not device.replays
    captured = run(folder, "--cuda-graphs")
    assert captured.notes == [*eager.notes, all_captured(PLANS[plan].stages)]
    assert device.replays
    assert len(set(eager.losses)) == STEPS
    assert_equal(captured, eager)


def assert_equal(found: Run, expected: Run) -> None:
    """Losses, parameters and the optimizer's state are equal to the bit."""
    assert found.losses == expected.losses
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A program of two stages on one rank, with three micro-batches in flight."""
    folder = tmp_path / "program"
    Plan(stages=2, order="gpipe").write(*small_graph("candle-uno", SAMPLES), folder)
    return folder


REGIONS = """<ir_version: 9, opset_import: ["" : 20]>
regions (float[1, 2, 8, 8] images) => (float loss)
<float[2, 2, 1, 1] weight = {1, 2, 3, 4}, float[2, 4] rows = {0, 0, 3, 3, 2, 2, 7, 5}, int64[2] owners = {0, 0}>
{
    x = Conv(images, weight)
    y = RoiAlign<sampling_ratio = 0, output_height = 2, output_width = 2>(x, rows, owners)
    loss = ReduceMean<keepdims = 0>(y)
}"""


def test_a_stage_that_waits_for_the_device_stays_eager(device: Device, tmp_path: Path) -> None:
    """Only the device knows how many samples a region takes."""
    folder = tmp_path / "program"
    file = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(REGIONS), str(file))
    model = read_model(file)
    write(model.graph, *one_device(model.graph, 1, True, 1), "loss", folder, model=file)
    eager = run(folder, "--no-cuda-graphs")
    captured = run(folder, "--cuda-graphs")
    reason = "stage 0 eager: an operator of the stage waits for the device"
    assert captured.notes[-1] == f"CUDA graphs: 0 of 1 stage captured; {reason}"
    assert not device.replays
    assert_equal(captured, eager)


def test_stages_stay_eager_where_memory_does_not_suffice(device: Device, small: Path) -> None:
    device.free_bytes = 4 * 2**30
    device.micro_batch_bytes = 2**30
    eager = run(small, "--no-cuda-graphs")
    captured = run(small, "--cuda-graphs")
    reason = "its graphs need about 4.0 GiB, more than 90% of the 4.0 GiB that are free"
    assert captured.notes[-1] == f"CUDA graphs: 0 of 2 stages captured; stages 0, 1 eager: {reason}"
    assert not device.replays
    assert_equal(captured, eager)


def test_stages_that_the_host_bounds_are_captured_by_default(device: Device, small: Path) -> None:
    nothing = run(small)
    hint = "(--cuda-graphs captures its stages nevertheless)"
    assert nothing.notes == [f"no CUDA graphs: the plan is not bound by the host {hint}"]
    assert not device.replays
    manifest = json.loads((small / "manifest.json").read_text(encoding="utf-8"))
    manifest["stages"][1]["host_bound"] = True
    (small / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    captured = run(small)
    reason = "stage 0 eager: the plan is not bound by the host"
    assert captured.notes == [f"CUDA graphs: 1 of 2 stages captured, and the update; {reason}"]
    assert device.replays == (2 * MICRO_BATCHES + 1) * (STEPS - 1)
    assert_equal(captured, nothing)


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_capture_that_fails_leaves_its_stage_eager(
    device: Device, small: Path, failing: int
) -> None:
    """The first stage's forward, its backward, or one of its later slots."""
    eager = run(small, "--no-cuda-graphs")
    device.failing = failing
    captured = run(small, "--cuda-graphs")
    reason = "the capture failed: CUDA error: out of memory"
    assert (
        captured.notes[-1]
        == f"CUDA graphs: 1 of 2 stages captured, and the update; stage 0 eager: {reason}"
    )
    assert (len(device.open_pools), len(device.released_pools)) == (0, 1)
    assert device.generator_states == ["a copy"]
    assert device.replays
    assert_equal(captured, eager)


def test_micro_batches_without_a_slot_run_eagerly(
    device: Device, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = StageGraphs._capture
    monkeypatch.setattr(StageGraphs, "_capture", lambda self, slots: capture(self, 1))
    eager = run(small, "--no-cuda-graphs")
    captured = run(small, "--cuda-graphs")
    # Forward and backward of one of three micro-batches, on two stages, and the update, in all
    # steps but the first.
    assert device.replays == (2 * 2 + 1) * (STEPS - 1)
    assert_equal(captured, eager)


def test_inference_is_captured(device: Device, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    outputs = tmp_path / "outputs.npz"
    graph, _ = small_graph("candle-uno", SAMPLES)
    write(graph, *one_device(graph, MICRO_BATCHES, False, SAMPLES), None, folder)
    found = []
    for flag in ("--no-cuda-graphs", "--cuda-graphs"):
        rank_of(folder, "--steps", STEPS, "--outputs", outputs, flag)
        found.append(read_outputs(outputs, read_manifest(folder)))
    assert device.replays == MICRO_BATCHES * (STEPS - 1)
    eager, captured = found
    assert eager.keys() == captured.keys()
    for name, array in eager.items():
        np.testing.assert_array_equal(captured[name], array)


UPDATES = {
    "adam, moving average, warm-up": Plan(
        optimizer=Optimizer("adam", lr=0.01),
        training=Training(ema_decay=0.9, max_norm=0.1),
        lr_scheduler=LRScheduler(warmup_steps=4, decay_type="cosine"),
    ),
    "sgd, overflows": Plan(
        "fp16", optimizer=Optimizer("sgd", lr=0.01, momentum=0.9, loss_scale=2.0**40)
    ),
    "adamw, overflows": Plan("fp16", optimizer=Optimizer("adamw", lr=0.01, loss_scale=2.0**40)),
}


@pytest.mark.parametrize("plan", UPDATES)
def test_captured_updates_are_equal_to_eager_updates(
    plan: str, device: Device, tmp_path: Path
) -> None:
    folder = tmp_path / "program"
    UPDATES[plan].write(*small_graph("candle-uno", SAMPLES), folder)
    flags = "--steps", 40
    eager = run(folder, *flags, "--no-cuda-graphs")
    captured = run(folder, *flags, "--cuda-graphs")
    assert captured.notes[-1] == "CUDA graphs: 1 of 1 stage captured, and the update"
    assert len(set(eager.losses)) > STEPS
    assert_equal(captured, eager)


def test_an_update_stays_eager_whose_optimizer_reads_the_host(
    device: Device, tmp_path: Path
) -> None:
    folder = tmp_path / "program"
    Plan(optimizer=Optimizer("lion", lr=0.01)).write(*small_graph("candle-uno", SAMPLES), folder)
    eager = run(folder, "--no-cuda-graphs")
    captured = run(folder, "--cuda-graphs")
    reason = "the update eager: its optimizer takes the learning rate from the host"
    assert captured.notes[-1] == f"CUDA graphs: 1 of 1 stage captured; {reason}"
    assert_equal(captured, eager)


def test_an_update_whose_capture_fails_stays_eager(device: Device, small: Path) -> None:
    eager = run(small, "--no-cuda-graphs")
    device.failing = 2 * 2 * MICRO_BATCHES + 1
    captured = run(small, "--cuda-graphs")
    reason = "the update eager: the capture failed: CUDA error: out of memory"
    assert captured.notes[-1] == f"CUDA graphs: 2 of 2 stages captured; {reason}"
    assert (len(device.open_pools), len(device.released_pools)) == (0, 1)
    assert device.generator_states == ["a copy"]
    assert_equal(captured, eager)


RANKS = {
    "pipeline": Grid(pipeline=2, data=1),
    "data": Grid(pipeline=1, data=2),
}
INSTALL = """\
import sys
sys.path.insert(0, {root!r})
from pytest import MonkeyPatch
from tests.backends.torch.runtime.recorded_graphs import install
install(MonkeyPatch())
"""
"""Lines of a rank's file that have its process record graphs."""


@pytest.fixture(scope="module")
def recording() -> Iterator[Pool]:
    """Two processes that record graphs, and run nothing else."""
    pool = Pool(2)
    yield pool
    pool.stop()


@pytest.mark.parametrize("shard", [False, True], ids=["", "sharded optimizer"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_exchange_between_captured_stages(
    ranks: str, shard: bool, recording: Pool, tmp_path: Path
) -> None:
    """Messages, and sums of gradients, lie between replays."""
    model = Trained(
        "gpt",
        *small_graph("gpt", 2 * SAMPLES),
        Step(0.0, {}),
        Path("model.onnx"),
        None,
        MICRO_BATCHES,
    )
    placement = RANKS[ranks].run(problem_of(model, 2))
    schedule = schedule_of(model.graph, placement, MICRO_BATCHES)
    folder = tmp_path / "program"
    write(model.graph, placement, schedule, model.loss, folder, "bf16", replace(ADAMW, shard=shard))
    for file in folder.glob("rank_*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(
            text.replace("import stage", f"{INSTALL.format(root=str(ROOT))}import stage", 1)
        )
    lines: dict[str, list[dict[str, Any]]] = {}
    for flag in ("--no-cuda-graphs", "--cuda-graphs"):
        report = tmp_path / f"{flag}.jsonl"
        recording.run(folder, "--device", "cpu", "--steps", STEPS, "--report", report, flag)
        lines[flag] = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    eager, captured = lines.values()
    assert [line["note"] for line in captured if "note" in line][-1] == all_captured(
        len(placement.stages)
    )
    losses = [[line["loss"] for line in own if "loss" in line] for own in (eager, captured)]
    assert len(set(losses[0])) == STEPS
    assert losses[1] == losses[0]


def test_a_run_on_a_cpu_says_that_it_has_no_graphs(small: Path) -> None:
    assert run(small, "--cuda-graphs").notes == [
        "CUDA graphs: 0 of 2 stages captured; stages 0, 1 eager: cpu devices have none"
    ]


def test_the_first_of_any_number_of_steps_is_followed_by_a_capture(
    device: Device, small: Path
) -> None:
    """A caller may run further steps than the options say."""
    with as_rank(small, 0, "--device", "cpu", "--cuda-graphs"):
        names = runpy.run_path(str(small / "rank_000.py"))
        names["rank"].set_up()
        for _ in range(STEPS):
            names["rank"].run(names["step"])
    assert device.replays == (2 * 2 * MICRO_BATCHES + 1) * (STEPS - 1)
