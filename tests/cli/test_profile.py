"""`autopipe profile` and `plan --costs`: from a model to a cost file to a plan that goes by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.configs.zoo import build, configure
from autopipe.ir.measured_costs import read_costs
from tests.cli.command_line import CommandLine

SETTINGS = {"hidden": "16", "vocabulary": "32", "sequence": "4", "loss": "true"}
QUICK = ("--micro-batch-sizes", "2", "--seconds", "0.1", "--device", "cpu")


@pytest.fixture
def model(command_line: CommandLine) -> Path:
    build(configure("rnnlm", SETTINGS)).save(command_line.folder / "rnnlm.onnx")
    return command_line.folder / "rnnlm.onnx"


def test_a_profile_is_planned_with(model: Path, command_line: CommandLine) -> None:
    ended = command_line.done("profile", model, *QUICK, "--name", "core", "--json", "-q")
    assert ended.err == ""
    shown = json.loads(ended.out)
    assert shown["costs"] == f"{model}.costs"
    assert shown["refused"] == []
    (device,) = read_costs(Path(shown["costs"])).devices
    assert device.device == "core"
    assert len(device.operations) == shown["devices"][0]["operations"]
    assert device.tasks is not None
    assert device.host_launch_s == 0.0, "a processor starts its operators itself"
    sizes = ("--gpus", 2, "--cluster", "cpu-local", "--batch-size", 8, "--micro-batches", 4)
    words = ("--strategy", "pipedream", *sizes, "--costs", shown["costs"])
    command_line.done("plan", model, *words, "-o", "with")
    explained = command_line.done("explain", "with").out
    nodes = json.loads(Path("with/plan.json").read_text())["summary"]["costs"]
    assert nodes["measured"] > 0
    assert nodes["extrapolated"] == 0
    assert f"costs: {nodes['measured']} of {nodes['measured']} nodes measured" in explained
    command_line.done("plan", model, *words[:-2], "-o", "without")
    without = json.loads(Path("without/plan.json").read_text())
    assert "costs" not in without["summary"]
    assert without["predictions"] != json.loads(Path("with/plan.json").read_text())["predictions"]
    Path(shown["costs"]).unlink()
    command_line.done("codegen", "with")


def test_other_sizes_are_judged_and_said(model: Path, command_line: CommandLine) -> None:
    command_line.done(
        "profile", model, *QUICK, "--degrees", "", "--source", "onnxruntime", "-o", "a.costs"
    )
    sizes = ("--gpus", 1, "--cluster", "cpu-local", "--micro-batch-size", 3)
    words = ("--strategy", "pipedream", *sizes, "--costs", "a.costs")
    command_line.done("plan", model, *words, "-o", "judged")
    extrapolated = json.loads(Path("judged/plan.json").read_text())["summary"]["costs"][
        "extrapolated"
    ]
    assert extrapolated > 0
    assert f", {extrapolated} extrapolated" in command_line.done("explain", "judged").out


def test_files_are_merged(model: Path, command_line: CommandLine) -> None:
    for size in (1, 2):
        words = (
            "--micro-batch-sizes",
            size,
            "--degrees",
            "",
            "--source",
            "onnxruntime",
            "--seconds",
            0.1,
        )
        command_line.done("profile", model, *words, "--name", "core", "-o", f"{size}.costs")
    command_line.done("profile", "--merge", "1.costs", "2.costs", "-o", "both.costs")
    (one,), (two,), (both,) = (read_costs(Path(f"{name}.costs")).devices for name in (1, 2, "both"))
    assert {each.operation for each in both.operations} == {
        each.operation for each in (*one.operations, *two.operations)
    }
    assert len(both.measured) == 2


def test_what_cannot_be_profiled(model: Path, command_line: CommandLine) -> None:
    refuses = command_line.refuses
    refuses(
        2,
        ("profile", model, "--micro-batch-sizes", "1,x"),
        "--micro-batch-sizes",
        "'1,x' is not a list",
    )
    refuses(2, ("profile", model, "--degrees", "0"), "--degrees")
    refuses(2, ("profile", model, model), "name one MODEL")
    refuses(2, ("profile", "--merge", model), "--merge requires -o FILE")
    refuses(2, ("profile", "--merge", model, "-o", "a.costs"), str(model), "not valid JSON")
    refuses(2, ("profile", model, "-o", "nowhere/a.costs"), "nowhere")
    refuses(3, ("profile", "none.onnx"), "none.onnx")
    refuses(2, ("profile", model, "--source", "onnxruntime", "--device", "cuda"), "--device")


def test_costs_that_cannot_be_planned_with(model: Path, command_line: CommandLine) -> None:
    Path("bad.costs").write_text("{}")
    Path("list.costs").write_text('{"format": "autopipe.costs/1", "devices": {}}')
    for name, says in (
        ("bad.costs", "format is missing"),
        ("list.costs", "devices is {}"),
        ("none.costs", "none.costs"),
    ):
        command_line.refuses(2, ("plan", model, "--gpus", 1, "--costs", name), name, says)
    command_line.refuses(2, ("plan", model, "--gpus", 1, "--costs", "pase-paper"), "costs")
