"""Exported models go from their file to verified ranks by the four commands of the README.

`./test -m sweep` runs every export; `scripts/exported_models.py` runs them too and writes the table
in docs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exports.journey import Journey, all_journeys, travel

TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
APART = "gpt2-dynamo-dynamic-loss"
"""The one whose ranks run in processes of their own."""
FAST = (
    "squeezenet-onnx-static-loss",
    "llama-torchscript-dynamic-forward",
    "dlrm-torchscript-dynamic-loss",
    "yolo-torchscript-static-loss",
    "gpt2_step-torchscript-static-forward",
    "resnet_qdq-torchscript-static-forward",
    "functions-hand-static-forward",
)
"""With it at least one of each exporter, kind of shapes and kind of output."""

SLOW = (pytest.mark.sweep, pytest.mark.timeout(1800))
JOURNEYS = {journey.name: journey for journey in all_journeys()}


@pytest.mark.distributed
def test_an_export_is_verified_on_four_ranks_that_launch_starts(tmp_path: Path) -> None:
    check(JOURNEYS[APART], tmp_path)


@pytest.mark.distributed
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=SLOW)
        for name in JOURNEYS
        if name != APART
    ],
)
def test_every_export_is_verified_on_four_ranks(name: str, tmp_path: Path) -> None:
    check(JOURNEYS[name], tmp_path)


def check(journey: Journey, folder: Path) -> None:
    outcome = travel(journey, folder)
    tolerance = TOLERANCE[journey.export.dtype]
    assert not outcome.failure
    assert sum(outcome.stages) == 4
    assert outcome.outputs is not None and outcome.outputs <= tolerance
    if journey.export.loss:
        assert outcome.steps == 2
        assert outcome.loss is not None and outcome.loss <= tolerance
        assert outcome.gradients is not None and outcome.gradients <= tolerance
        assert outcome.updates is not None and outcome.updates <= tolerance
    else:
        assert outcome.steps == 1
        assert outcome.ranks_outputs is not None and outcome.ranks_outputs <= tolerance
