"""Programs with one function per layer (`codegen --style layers`) against programs with one line per
operator: equal losses, bit for bit, and equal files on a static check.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.configs.zoo import build, configure
from tests.cli.command_line import CommandLine

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("here")]

SIZES = {
    "layers": "6",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
PLANS = {
    "tensor parallel": (
        *("--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "strategy.tensor=2"),
        *("--schedule", "1f1b"),
    ),
    "split backward": (
        *("--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "strategy.data=2"),
        *("--schedule", "zb_h1"),
    ),
    "bf16": ("--strategy", "data_parallel", "--set", "precision=bf16"),
    "recomputed": ("--strategy", "data_parallel", "--set", "recompute=full"),
    "recomputed, split backward": (
        *("--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "strategy.data=2"),
        *("--schedule", "zb_h1", "--set", "recompute=full"),
    ),
}


def losses(line: CommandLine, folder: str) -> list[float]:
    """Return the losses of three steps of a program."""
    shown = line.done("launch", folder, "--device", "cpu", "--steps", 3, "--json")
    return [step["loss"] for step in json.loads(shown.out.splitlines()[-1])["steps"]]


@pytest.mark.parametrize("name", PLANS)
def test_losses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = CommandLine(tmp_path, capfd)
    build(configure("gpt", SIZES)).save(line.folder / "gpt.onnx")
    flags = ("--gpus", 4, "--cluster", "cpu-local", "--batch-size", 16, "--micro-batches", 4)
    line.done("plan", "gpt.onnx", *flags, *PLANS[name], "-o", "plan")
    line.done("codegen", "plan", "-o", "flat", "--style", "flat")
    line.done("codegen", "plan")
    assert losses(line, "plan/program") == losses(line, "flat")
    assert "edited" not in line.done("verify", "plan", "--static").err
    stages = (line.folder / "plan" / "program").glob("stage_*.py")
    texts = [each.read_text(encoding="utf-8") for each in stages]
    assert any("One of the " in each for each in texts)
