"""Graphs that only move data: their predicted step takes no time, by which no command divides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.command_line import CommandLine
from tests.passes.frontend.building import integers, model, node, saved

CLUSTER = ("--gpus", 2, "--cluster", "a100-80gb", "-q")


def _flipped(folder: Path) -> Path:
    held = {"start": integers(5), "end": integers(-100), "axis": integers(2), "step": integers(-1)}
    return saved(
        model([node("Slice", "x start end axis step", "y")], {"x": [4, 3, 6]}, "y", held), folder
    )


def _transposed(folder: Path) -> Path:
    return saved(
        model([node("Transpose", "x", "y", perm=[0, 2, 1])], {"x": [4, 3, 6]}, "y"), folder
    )


@pytest.mark.parametrize("strategy", ["auto", "tepdist", "pase", "pipedream", "data_parallel"])
@pytest.mark.parametrize("build", [_flipped, _transposed])
def test_a_plan_without_work_is_made_and_explained(
    command_line: CommandLine, build: object, strategy: str
) -> None:
    assert callable(build)
    build(command_line.folder)
    shown = command_line.done(
        "plan", "model.onnx", "--strategy", strategy, "-o", "p", "--json", *CLUSTER
    )
    assert "internal error" not in shown.err
    assert json.loads(shown.out)["summary"]["step_time_s"] == 0
    for words in (
        ("show", "p"),
        ("show", "p", "--html", "p.html"),
        ("explain", "p"),
        ("compare", "p", "p"),
    ):
        command_line.done(*words)
    command_line.done("explain", "p", "--degrees")


@pytest.mark.parametrize("verbosity", [(), ("--json",), ("--quiet",), ("--verbose",)])
def test_a_program_without_work_writes_its_outputs(
    command_line: CommandLine, verbosity: tuple[str, ...]
) -> None:
    """The table of predictions and measurements has no predicted rate, which would be infinite."""
    path = _flipped(command_line.folder)
    command_line.done("plan", "model.onnx", "--strategy", "tepdist", "-o", "p", *CLUSTER)
    command_line.done("codegen", "p", "-q")
    x = np.random.default_rng(0).standard_normal((4, 3, 6)).astype(np.float32)
    np.savez("data.npz", x=x)
    words = ("--device", "cpu", "--data", "data.npz", "--outputs", "out.npz", *verbosity)
    shown = command_line.done("launch", "p/program", *words)
    if not verbosity:
        rates = [
            line.split() for line in shown.out.splitlines() if line.strip().startswith("samples/s")
        ]
        assert [row[1] for row in rates] == ["-"]
    found = np.load("out.npz")
    assert onnx.load(path).graph.output[0].name in found
    np.testing.assert_array_equal(found["y"], x[:, :, ::-1])


def test_a_graph_without_operators_is_launched(command_line: CommandLine) -> None:
    """Its output is known while the file is read: no operator is left to place."""
    saved(model([node("Shape", "x", "y")], {"x": [4, 3, 6]}, "y"), command_line.folder)
    command_line.done(
        "plan", "model.onnx", "--gpus", 1, "--strategy", "data_parallel", "-o", "p", "-q"
    )
    command_line.done("codegen", "p", "-q")
    command_line.done("launch", "p/program", "--device", "cpu", "--outputs", "out.npz", "-q")
    np.testing.assert_array_equal(np.load("out.npz")["y"], [[4, 3, 6]])
