"""`autopipe codegen --ranks`: programs of some ranks of a large plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType

import onnx
import pytest
from onnx import TensorProto, helper

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure


def test_some_ranks_are_written_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "layers": "4",
        "hidden": "32",
        "heads": "2",
        "sequence": "16",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", sizes)).save(tmp_path / "gpt.onnx")
    plan = str(tmp_path / "plan")
    flags = ["--gpus", "64", "--strategy", "grid", "--schedule", "1f1b", "--batch-size", "64"]
    degrees = [
        "--set",
        "strategy.pipeline=4",
        "--set",
        "strategy.tensor=2",
        "--micro-batch-size",
        "8",
    ]
    assert main(["plan", str(tmp_path / "gpt.onnx"), *flags, *degrees, "-q", "-o", plan]) == 0
    assert main(["codegen", plan, "--ranks", "0,63,63", "-q"]) == 0
    program = tmp_path / "plan" / "program"
    assert sorted(each.name for each in program.glob("rank_*.py")) == ["rank_000.py", "rank_063.py"]
    assert not (program / "reference").exists()
    assert json.loads((program / "manifest.json").read_text())["world_size"] == 64
    capfd.readouterr()
    for words, message in (
        (["launch", str(program), "--dry-run", "--rank", "5"], "lacks the file of rank 5"),
        (
            ["launch", str(program), "--device", "cpu"],
            "62 of 64 ranks were not generated, the first is 1",
        ),
        (["codegen", plan, "--ranks", "64"], "rank 64 does not exist"),
        (["codegen", plan, "--ranks", "a"], "no list of numbers"),
    ):
        assert main(words) == 2
        assert message in capfd.readouterr().err


def _split(results: int) -> onnx.ModelProto:
    """A model that adds the first and the last of many parts of its input."""
    names = [f"part_{index}" for index in range(results)]
    nodes = [
        helper.make_node("Split", ["x"], names, axis=1, num_outputs=results),
        helper.make_node("Add", [names[0], names[-1]], ["y"]),
    ]
    tensors = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, size])]
        for name, size in (("x", results), ("y", 1))
    ]
    return helper.make_model(
        helper.make_graph(nodes, "parts", *tensors), opset_imports=[helper.make_opsetid("", 18)]
    )


def test_the_work_of_an_operator_is_linear_in_its_results(tmp_path: Path) -> None:
    """Count the Python calls: twice the results take about twice the calls, and not four times."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    counts = []
    for results in (10, 1000, 2000):  # The first loads the modules.
        model = tmp_path / f"split_{results}.onnx"
        plan = str(tmp_path / f"{results}.plan")
        onnx.save(_split(results), model)
        flags = [
            "--mode",
            "infer",
            "--gpus",
            "1",
            "--strategy",
            "data_parallel",
            "--batch-size",
            "2",
            "-q",
        ]
        assert main(["plan", str(model), *flags, "-o", plan]) == 0
        calls = 0
        sys.setprofile(count)
        try:
            code = main(["codegen", plan, "-q"])
        finally:
            sys.setprofile(None)
        assert code == 0
        counts.append(calls)
    assert counts[2] < 2.5 * counts[1]
