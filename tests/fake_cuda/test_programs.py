"""Programs on fake CUDA tensors, forward, backward, sums of gradients and update: nothing runs on
the CPU, and the host neither waits nor copies but where it may.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.passes.registry import scheduler_names
from tests.backends.torch.runtime.modes.test_dry_run import PLANS, SIZES, generated
from tests.distributed.support import zoo
from tests.distributed.support.launching import ROOT, write_chain
from tests.distributed.support.running import write
from tests.distributed.support.shapes import problem_of, scheduled, tied_chain
from tests.fake_cuda.watching import ALLOWED, forbidden

RANKS = 4
Watch = Callable[..., None]
Watched = Callable[..., dict[str, str | list[str]]]


@pytest.fixture
def watched(fake_cuda_library: Path, tmp_path: Path) -> Watched:
    """`watched(PROGRAM, ...)` runs all ranks of programs, or of `(PROGRAM, RANK)` one: what is
    forbidden of that.
    """

    def run(*programs: Path | tuple[Path, int]) -> dict[str, str | list[str]]:
        found = tmp_path / "found.jsonl"
        words = [
            str(each) if isinstance(each, Path) else f"{each[0]}:{each[1]}" for each in programs
        ]
        script = Path(__file__).with_name("programs.py")
        command = [
            sys.executable,
            "-m",
            "autopipe.backends.torch.fake_cuda",
            fake_cuda_library,
            script,
            found,
            *words,
        ]
        subprocess.run(
            command, env=dict(os.environ) | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True
        )
        rows = [json.loads(text) for text in found.read_text(encoding="utf-8").splitlines()]
        assert len(rows) >= len(programs)
        return {
            f"{row['program']} rank {row['rank']}": row["error"] or forbidden(row["found"])
            for row in rows
            if row["error"] or forbidden(row["found"])
        }

    return run


@pytest.fixture
def watch(watched: Watched) -> Watch:
    """As `watched`, for programs that do what they may."""

    def run(*programs: Path | tuple[Path, int]) -> None:
        wrong = watched(*programs)
        assert not wrong, json.dumps(wrong, indent=1)

    return run


def test_few_places_may_wait_or_copy() -> None:
    assert len(ALLOWED) <= 5


def test_what_a_stage_may_not_do_is_found(watched: Watched, tmp_path: Path) -> None:
    lines = {
        "in0 = in0.cpu().to(p.device)": "copies from cuda to cpu and waits",
        "in0 = in0 + float(in0.sum())": "reads values",
        "in0 = in0 + torch.zeros(4)": "found at least two devices, cuda:0 and cpu",
        "in0 = in0 * torch.ones(())": "mixes devices, cpu and cuda to cuda",
        "torch.cuda.synchronize()": "waits for the device",
    }
    programs = [write_chain(tmp_path / str(number)) for number in range(len(lines))]
    begins = "def forward(p, in0):\n"
    for program, line in zip(programs, lines, strict=True):
        stage = program / "stage_00.py"
        text = stage.read_text(encoding="utf-8")
        assert begins in text
        stage.write_text(text.replace(begins, f"{begins}    {line}\n"), encoding="utf-8")
    found = watched(*((program, 0) for program in programs))
    for program, says in zip(programs, lines.values(), strict=True):
        told = str(found[f"{program} rank 0"])
        assert says in told and "stage_00.py" in told


def test_every_schedule(watch: Watch, tmp_path: Path) -> None:
    graph, loss = tied_chain(4 * RANKS)
    programs = []
    for name in scheduler_names():
        if name == "csv":  # It follows a file.
            continue
        found = scheduled(name, problem_of(graph, loss, 2 * RANKS, RANKS))
        assert found is not None
        write(graph, *found, loss, tmp_path / name)
        programs.append(tmp_path / name)
    watch(*programs)


def test_plans_of_gpt(watch: Watch, tmp_path: Path) -> None:
    """Shares of the optimizer's state, tensor parallelism, bf16, recomputation, backwards in
    halves.
    """
    model = tmp_path / "gpt.onnx"
    build(configure("gpt", SIZES)).save(model)
    programs = [
        generated(model, tmp_path / str(index), *flags)
        for index, flags in enumerate(PLANS.values())
    ]
    watch(*((program, rank) for program in programs for rank in (0, 3)))


PIPELINE = ("--strategy", "grid", "--set", "strategy.pipeline=2", "--schedule", "1f1b")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "replicas": ("--strategy", "data_parallel"),
    "pase": ("--strategy", "pase"),
    "pipeline": PIPELINE,
    "pipeline, bf16, recomputed": (*PIPELINE, "--set", "precision=bf16", "--set", "recompute=full"),
    "pipeline, backwards in halves": (*PIPELINE[:-1], "zb_h1"),
}


def planned(name: str, folder: Path, flags: Sequence[str]) -> Path:
    """The program of a small model of the zoo on four devices."""
    model = folder / f"{name}.onnx"
    if not model.exists():
        build(configure(name, {**zoo.SIZES[name], "loss": "true", "weights": "none"})).save(model)
    plan = folder / f"{name}.{len(list(folder.iterdir()))}"
    words = [
        "plan",
        model,
        "--gpus",
        RANKS,
        "--cluster",
        "cpu-local",
        "--batch-size",
        16,
        "--micro-batches",
        4,
    ]
    assert (
        main([*map(str, words), "--set", "optimizer.name=adamw", *flags, "-q", "-o", str(plan)])
        == 0
    )
    assert main(["codegen", str(plan), "-q"]) == 0
    return plan / "program"


def test_other_models(watch: Watch, tmp_path: Path) -> None:
    """A step of each kind of operator: experts, lookups, recurrence, convolutions up and down,
    batch norms, dropout.
    """
    chosen = {
        "moe": "pipeline",
        "dlrm": "pase",
        "rnnlm": "replicas",
        "unet": "pipeline, bf16, recomputed",
    }
    watch(*((planned(name, tmp_path, STRATEGIES[plan]), 0) for name, plan in chosen.items()))


def test_a_rank_of_64_of_llama_7b(watch: Watch, tmp_path: Path) -> None:
    model = tmp_path / "llama.onnx"
    plan = tmp_path / "llama.plan"
    build(configure("llama", {"size": "7b", "loss": "true", "weights": "none"})).save(model)
    words = [
        "plan",
        str(model),
        "--gpus",
        "64",
        "--cluster",
        "h100-80gb",
        "--batch-size",
        "64",
        "--micro-batches",
        "16",
    ]
    words += [
        "--strategy",
        "grid",
        "--set",
        "strategy.pipeline=4",
        "--set",
        "strategy.tensor=8",
        "--schedule",
        "1f1b",
    ]
    words += ["--set", "precision=bf16", "--set", "recompute=full", "--set", "optimizer.name=adamw"]
    assert main([*words, "-q", "-o", str(plan)]) == 0
    assert main(["codegen", str(plan), "--ranks", "0", "-q"]) == 0
    watch((plan / "program", 0))


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(zoo.SIZES))
def test_models_of_the_zoo(watch: Watch, tmp_path: Path, name: str) -> None:
    watch(*(planned(name, tmp_path, flags) for flags in STRATEGIES.values()))
