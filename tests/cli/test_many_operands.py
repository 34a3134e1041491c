"""Operators of very many operands: Python's parser limits how deep their code may be nested."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cli.command_line import CommandLine
from tests.passes.frontend.building import model, node, saved

COUNT = 8_000
"""Operands; the parser gives up at a few hundred nested calls and a few thousand terms."""


@pytest.mark.parametrize(
    ("operator", "factor"), [("Sum", COUNT / 2), ("Mean", 0.5), ("Max", 1.0), ("Min", 0.0)]
)
def test_a_program_of_very_many_operands_runs(
    command_line: CommandLine, operator: str, factor: float
) -> None:
    operands = " ".join(["x", "zero"] * (COUNT // 2))
    held = {"zero": np.zeros((), np.float32)}
    saved(model([node(operator, operands, "y")], {"x": [4, 4]}, "y", held), command_line.folder)
    command_line.done("plan", "model.onnx", "--gpus", 1, "--strategy", "pipedream", "-o", "p", "-q")
    command_line.done("codegen", "p", "-q")
    x = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
    np.savez("data.npz", x=x)
    command_line.done(
        "launch", "p/program", "--device", "cpu", "--data", "data.npz", "--outputs", "out.npz", "-q"
    )
    np.testing.assert_allclose(np.load("out.npz")["y"], x * factor, rtol=1e-6)
