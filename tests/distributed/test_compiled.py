"""Stages that torch.compile has compiled: they compute what one device computes eagerly, and no
step compiles.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from autopipe.backends.torch.verification import read_losses
from autopipe.cli.main import main
from tests.distributed.support import dropping
from tests.distributed.support.alone import as_rank
from tests.distributed.support.pool import Pools
from tests.distributed.test_verify import OF_TRAINING, generated, verified

pytestmark = pytest.mark.distributed
PLANS = {
    "recomputed": (
        "--gpus",
        "2",
        "--schedule",
        "interleaved_1f1b",
        "--strategy",
        "grid",
        "--set",
        "strategy.pipeline=2",
        "--set",
        "strategy.stages_per_rank=2",
        "--set",
        "recompute=full",
    ),
    "halves": ("--gpus", "2", "--schedule", "zb_h1", "--set", "strategy.replicate=false"),
    "shared": (
        "--gpus",
        "2",
        "--schedule",
        "1f1b",
        "--strategy",
        "grid",
        "--set",
        "strategy.tensor=2",
    ),
    "bf16": ("--gpus", "1", "--schedule", "1f1b", "--set", "precision=bf16"),
}
"""Flags of plans, by the properties of their stages."""
SWEPT = {"recomputed", "bf16"}
"""Plans that run in sweeps, since each of them compiles for more than ten seconds. Recomputed
segments also run in `test_every_run_computes_the_same_and_no_step_compiles`.
"""
BATCH = ("--cluster", "cpu-local", "--batch-size", "4", "--micro-batches", "4")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "plan",
    [pytest.param(name, marks=[pytest.mark.sweep] if name in SWEPT else []) for name in PLANS],
)
def test_gradients_are_those_of_one_device(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = generated(tmp_path, *PLANS[plan], *BATCH, layers=1)
    code, checks = verified(program, capsys, "--compile")
    assert code == 0
    assert set(checks) == OF_TRAINING


RECOMPUTED = (
    *("--gpus", "1", "--schedule", "1f1b", "--strategy", "pipedream"),
    *("--set", "recompute=full"),
)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A program for one rank, in recomputed segments."""
    return generated(tmp_path, *RECOMPUTED, *BATCH, layers=1)


@pytest.fixture
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program for one rank that draws random numbers in recomputed segments. The numbers are few,
    since Philox compiles for long.
    """
    model = tmp_path / "model.onnx"
    plan = tmp_path / "plan"
    monkeypatch.setattr(dropping, "DROPPED", {"Softmax"})
    monkeypatch.setitem(dropping.GPT, "layers", "1")
    dropping.save_with_dropout(model)
    assert main(["plan", str(model), *RECOMPUTED, *BATCH, "-o", str(plan), "-q"]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    return plan / "program"


@pytest.mark.parametrize("kind", ["plain", pytest.param("drawing", marks=pytest.mark.sweep)])
def test_every_run_computes_the_same_and_no_step_compiles(
    pools: Pools, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program: Path = request.getfixturevalue(kind)
    words = {
        name: ("--device", "cpu", "--steps", 3, "--report", tmp_path / name)
        for name in ("eager", "one", "two")
    }
    pools.of(1).run(program, *words["eager"])
    for name in ("one", "two"):
        with as_rank(program, 0, *words[name], "--compile"):
            run_compiled(program / "rank_000.py")
    losses = {name: read_losses(tmp_path / name) for name in words}
    assert losses["one"] == losses["two"]
    assert losses["one"] == pytest.approx(losses["eager"], rel=1e-5)
    assert len(set(losses["one"])) == 3


def run_compiled(file: Path) -> None:
    """Run a rank, none of whose steps may compile anything."""
    names = runpy.run_path(str(file))
    before = counters["stats"]["unique_graphs"]
    at_steps = []

    def step() -> None:
        at_steps.append(counters["stats"]["unique_graphs"])
        names["step"]()

    names["rank"].main(step)
    assert before < at_steps[0] == counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_equal_layers_are_compiled_once(tmp_path: Path, recompute: str) -> None:
    """The number of compiled graphs does not depend on the number of layers."""
    flags = ("--gpus", "1", "--schedule", "1f1b", "--set", f"recompute={recompute}")
    graphs = []
    for layers in (3, 4):
        folder = tmp_path / str(layers)
        folder.mkdir()
        program = generated(folder, *flags, *BATCH, layers=layers)
        before = counters["stats"]["unique_graphs"]
        with as_rank(program, 0, "--device", "cpu", "--compile"):
            runpy.run_path(str(program / "rank_000.py"), run_name="__main__")
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs[0] == graphs[1]
    # A layer, the part before the layers and the part after them. A recomputed segment is compiled
    # for a forward without autograd and for one with it.
    assert graphs[0] == 3 if recompute == "none" else graphs[0] % 2 == 0


def test_there_may_be_no_compiler(
    drawing: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    assert main(["launch", str(drawing), "--device", "cpu", "--compile"]) == 2
    error, hint = capfd.readouterr().err.splitlines()[-2:]
    assert error == "error: --compile: no working C++ compiler"
    assert hint == "hint: install g++, or name a compiler in CXX"
