"""Dry runs: without values a rank does what it does with them, and one that is not as its files say
is found out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import LaunchError
from tests.distributed.support.alone import dry_run
from tests.distributed.support.launching import ROOT, write_chain

SIZES = {
    "layers": "2",
    "hidden": "32",
    "heads": "4",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
PIPELINE = ("--strategy", "grid", "--set", "strategy.pipeline=2")
PLANS = {
    "replicas with state in shares": ("--strategy", "data_parallel", "--set", "optimizer.zero_stage=1"),
    "tensor parallel, bf16": ("--strategy", "handcrafted", "--set", "strategy.tensor=4", "--set", "precision=bf16"),
    "all three, bf16, recomputed": (
        *PIPELINE, "--set", "strategy.tensor=2", "--schedule", "1f1b", "--set", "recompute=full",
        "--set", "precision=bf16",
    ),
    "backwards in halves": (*PIPELINE, "--set", "strategy.tensor=2", "--schedule", "zb_h1"),
    "fp16": (*PIPELINE, "--set", "strategy.tensor=2", "--set", "precision=fp16"),
}  # fmt: skip

PEAK_OF = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Started by a small process: the system counts as a process's peak what whoever started it had,
too.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dry") / "gpt.onnx"
    build(configure("gpt", SIZES)).save(path)
    return path


def generated(model: Path, folder: Path, *flags: str) -> Path:
    """The program of a plan for four devices."""
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
    words += ["--set", "optimizer.name=adamw", "--schedule", "1f1b", *flags]
    assert main([*words, "-q", "-o", str(folder)]) == 0
    assert main(["codegen", str(folder), "-q"]) == 0
    return folder / "program"


def rehearsed(program: Path, rank: int, device: str) -> tuple[dict[str, Any], list[object]]:
    """What a rank's dry run says but for memory; the forms of its parameters, and of what its
    optimizer keeps.
    """
    path = program / "report.json"
    ended = dry_run(program, rank, "--device", device, "--report", path)
    assert ended.update.optimizer is not None
    kept = [
        sorted((name, form(each)) for name, each in own.items())
        for own in ended.update.optimizer.state.values()
    ]
    report = json.loads(path.read_text(encoding="utf-8"))
    del report["peak_memory_bytes"]
    return report, [*map(form, ended.parameters.values()), kept]


def form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride()


@pytest.mark.parametrize("flags", PLANS.values(), ids=PLANS)
def test_without_values_a_rank_does_the_same(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    program = generated(model, tmp_path, *flags)
    reports = []
    for rank in (0, 3):
        found = rehearsed(program, rank, "meta")
        assert found == rehearsed(program, rank, "cpu")
        reports.append(found[0])
    assert all(report["communication_bytes"]["gradient"] for report in reports)


def test_both_ends_of_each_channel_count_the_same_messages(model: Path, tmp_path: Path) -> None:
    program = generated(
        model, tmp_path, *PLANS["all three, bf16, recomputed"], "--set", "strategy.data=1"
    )
    ends: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for rank in range(4):
        for message in rehearsed(program, rank, "meta")[0]["messages"]:
            ends[message["source"] == rank][json.dumps(message)] += 1
    assert ends[True] == ends[False] and len(ends[True]) >= 4


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        ("stage_00.py", "'v4': (torch.float64, (2", "'v4': (torch.float64, (3", "result 0 of stage 0 is float64 [2"),
        ("stage_00.py", "(2, 4)", "(1, 4)", "argument in0 of stage 0 is float64 [2, 4]"),
        ("rank_000.py", "stage=1, channel=0", "stage=1, channel=0, offsets=((1, 3), (0, 4))", "is float64 [1, 4]"),
    ],
    ids=["result", "argument", "block sent"],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_wrong_shape_is_found(
    tmp_path: Path, device: str, file: str, before: str, after: str, words: str
) -> None:
    program = write_chain(tmp_path / "program", groups=((0, 1), (2,)))
    # In a folder of its own: a file of the same second and length would be taken for the one that
    # was compiled.
    wrong = Path(shutil.copytree(program, tmp_path / "wrong"))
    dry_run(program, 0, "--device", device)
    text = (program / file).read_text(encoding="utf-8")
    assert before in text
    (wrong / file).write_text(text.replace(before, after), encoding="utf-8")
    with pytest.raises(LaunchError) as caught:
        dry_run(wrong, 0, "--device", device)
    assert words in caught.value.message


def test_nothing_is_taken_for_weights(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden": "8192", "weights": "none"}
    build(configure("gpt", sizes)).save(tmp_path / "gpt.onnx")
    program = generated(
        tmp_path / "gpt.onnx", tmp_path / "plan", *PIPELINE, "--cluster", "h100-80gb"
    )
    report = tmp_path / "report.json"
    world = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        str(program / "run.py"),
        "--dry-run",
        "--device",
        "meta",
        "--report",
        str(report),
    ]
    starter = [sys.executable, "-c", PEAK_OF, *command]
    done = subprocess.run(
        starter, env=dict(os.environ) | world, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["parameter_bytes"] > 1 << 30
    # gradients, and two numbers of AdamW
    assert found["peak_memory_bytes"] > 4 * found["parameter_bytes"]
    assert int(done.stdout.splitlines()[-1]) * 1024 < 1 << 30
