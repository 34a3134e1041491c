"""`autopipe codegen`: programs of some ranks of a large plan, and the manifest of a plan bound by the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
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


CLUSTER = """\
name: mine
device:
  name: D
  memory: 8GB
  peak: {fp32: 10TFLOP/s}
  bandwidth: 1000GB/s
  launch_latency: 4us
  host_launch: HOST
  efficiency: {matmul: 1, convolution: 1, elementwise: 1, normalization: 1, reduction: 1, memory: 1, recurrent: 1}
levels:
  - {name: node, size: 1, latency: 1us, bandwidth: 10GB/s}
"""


@pytest.mark.parametrize(("host_launch", "bound"), [("10ms", True), ("1ns", False)])
def test_stages_that_the_host_bounds_are_marked(tmp_path: Path, host_launch: str, bound: bool) -> None:
    sizes = {"layers": "1", "hidden": "16", "heads": "2", "sequence": "8", "vocabulary": "32", "loss": "true"}
    build(configure("gpt", sizes)).save(tmp_path / "gpt.onnx")
    cluster, plan = tmp_path / "mine.yaml", tmp_path / "plan"
    cluster.write_text(CLUSTER.replace("HOST", host_launch))
    words = ["plan", str(tmp_path / "gpt.onnx"), "--cluster", str(cluster), "--strategy", "data_parallel"]
    assert main([*words, "--schedule", "gpipe", "-q", "-o", str(plan)]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    assert [stage.host_bound for stage in read_manifest(plan / "program").stages] == [bound]
    for folder in (plan / "program" / "reference", plan / "program" / "forward"):
        assert not read_manifest(folder).stages[0].host_bound, "predicted is the plan's step alone"
