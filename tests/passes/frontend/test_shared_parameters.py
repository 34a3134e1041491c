"""Vectors that an exporter merged are trained as one, and the user is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import INT64, Shape, floats, model, node, saved


@pytest.mark.parametrize(("second", "mode", "warned"), [
    ("b", Mode.TRAIN, True), ("c", Mode.TRAIN, False), ("b", Mode.INFER, False),
])  # fmt: skip
def test_a_bias_that_two_layers_read_is_warned_of(second: str, mode: Mode, warned: bool, tmp_path: Path) -> None:
    nodes = [
        node("Gemm", "x w b", "h"),
        node("Gemm", f"h w {second}", "y"),
        node("SoftmaxCrossEntropyLoss", "y labels", "loss"),
    ]
    inputs: dict[str, Shape | tuple[int, Shape]] = {"x": [4, 5], "labels": (INT64, [4])}
    held = {name: floats(*shape) for name, shape in (("w", (5, 5)), ("b", (5,)), ("c", (5,)))}
    read = read_model(saved(model(nodes, inputs, "loss", held), tmp_path), mode=mode)  # type: ignore[arg-type]
    if warned:
        (warning,) = read.warnings
        assert warning.startswith("parameter 'b' is read by 2 nodes and trained as one")
    else:
        assert read.warnings == (), "a tied matrix is no accident"
