"""Strategies that choose their stages' micro-batches, by the command line: what they plan, and what
they refuse.
"""

from __future__ import annotations

import json

import pytest

from autopipe.configs.zoo import build, configure
from tests.cli.command_line import CommandLine

DLRM = {
    "dense_branches": "2",
    "sparse_branches": "2",
    "dense_layers": "2",
    "rows": "50",
    "width": "16",
    "bag": "4",
}
CANDLE = {"branches": "3", "layers": "2"}
MODELS = {"dlrm": DLRM, "candle-uno": CANDLE}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, command_line: CommandLine) -> str:
    """A small model of branches in the working folder."""
    settings = {"features": "16", "hidden": "32", "loss": "true"} | MODELS[request.param]
    build(configure(request.param, settings)).save(command_line.folder / "model.onnx")
    return "model.onnx"


@pytest.mark.parametrize("strategy", ["graphpipe", "piper", "pipedream"])
def test_batches_of_any_size(command_line: CommandLine, model: str, strategy: str) -> None:
    """Lines of equal promise among them: such small models have several."""
    shown = command_line.done(
        "plan",
        model,
        "--gpus",
        4,
        "--cluster",
        "cpu-local",
        "--strategy",
        strategy,
        "--batch-size",
        16,
        "--json",
    )
    summary = json.loads(shown.out)["summary"]
    assert summary["micro_batches"] * summary["micro_batch_size"] == 16
    assert summary["devices"] == 4
