"""`autopipe codegen --ranks`: programs of some ranks of a large plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure


def test_some_ranks_are_written_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": "4", "hidden": "32", "heads": "2", "sequence": "16", "vocabulary": "64", "loss": "true"}
    build(configure("gpt", sizes)).save(tmp_path / "gpt.onnx")
    plan = str(tmp_path / "plan")
    flags = ["--gpus", "64", "--strategy", "grid", "--schedule", "1f1b", "--batch-size", "64"]
    degrees = ["--set", "strategy.pipeline=4", "--set", "strategy.tensor=2", "--micro-batch-size", "8"]
    assert main(["plan", str(tmp_path / "gpt.onnx"), *flags, *degrees, "-q", "-o", plan]) == 0
    assert main(["codegen", plan, "--ranks", "0,63,63", "-q"]) == 0
    program = tmp_path / "plan" / "program"
    assert sorted(each.name for each in program.glob("rank_*.py")) == ["rank_000.py", "rank_063.py"]
    assert not (program / "reference").exists()
    assert json.loads((program / "manifest.json").read_text())["world_size"] == 64
    capfd.readouterr()
    for words, message in (
        (["launch", str(program), "--dry-run", "--rank", "5"], "rank 5 was not generated"),
        (["launch", str(program), "--device", "cpu"], "62 of 64 ranks were not generated, the first is 1"),
        (["codegen", plan, "--ranks", "64"], "there is no rank 64"),
        (["codegen", plan, "--ranks", "a"], "no list of numbers"),
    ):
        assert main(words) == 2
        assert message in capfd.readouterr().err
