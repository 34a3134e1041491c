"""Decoders of the kind that onnxruntime-genai runs, from their file to verified ranks:
GroupQueryAttention with its cache, of samples that have different lengths (masks are drawn), equals
ONNX Runtime's kernel on any plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopipe.cli.main import main
from tests.exports.genai import decoder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("here")]

TOKEN = {"sequence_length": 1, "past_sequence_length": 8, "total_sequence_length": 9}
BUFFER = {"sequence_length": 1, "past_sequence_length": 12, "total_sequence_length": 12}
PROMPT = {"sequence_length": 12, "past_sequence_length": 16, "total_sequence_length": 12}
PIPELINE_OF_HEADS = (
    "grid",
    "--set=strategy.pipeline=2",
    "--set=strategy.tensor=2",
    "--micro-batches=2",
)
CASES: list[tuple[dict[str, int], tuple[str, ...], dict[str, Any]]] = [
    (TOKEN, PIPELINE_OF_HEADS, {}),
    (PROMPT, ("handcrafted",), {"packed": True, "local_window_size": 4}),
]
MORE: list[tuple[dict[str, int], tuple[str, ...], dict[str, Any]]] = [
    (BUFFER, PIPELINE_OF_HEADS, {"packed": True}),
    (BUFFER, ("grid", "--set=strategy.pipeline=4", "--micro-batches=4"), {"softcap": 3.0}),
    (TOKEN, ("pase",), {"smooth_softmax": 1}),
    (TOKEN, ("auto",), {"packed": True}),
]


@pytest.mark.parametrize(("extents", "strategy", "settings"), CASES)
def test_a_step_of_four_ranks_is_that_of_onnx_runtime(
    extents: dict[str, int], strategy: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    check(extents, strategy, settings, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize(("extents", "strategy", "settings"), MORE)
def test_steps_of_other_plans_are_those_of_onnx_runtime(
    extents: dict[str, int], strategy: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    check(extents, strategy, settings, tmp_path)


def check(
    extents: dict[str, int], strategy: tuple[str, ...], settings: dict[str, Any], folder: Path
) -> None:
    model = decoder(folder / "decoder.onnx", **settings)
    dims = [f"--dim={name}={extent}" for name, extent in extents.items()]
    size = ["--gpus=4", "--batch-size=4", "--cluster=cpu-local", "--strategy", *strategy]
    assert main(["plan", str(model), "-q", "-o", str(folder / "plan"), *dims, *size]) == 0
    assert main(["codegen", str(folder / "plan"), "-q"]) == 0
    stages = json.loads((folder / "plan" / "plan.json").read_text(encoding="utf-8"))["placement"][
        "stages"
    ]
    assert (
        settings.get("packed")
        or strategy != PIPELINE_OF_HEADS
        or ["h", 2]
        in [axis for stage in stages for each in stage["splits"] for axis in each["split"]]
    ), "heads are not split"
    assert main(["verify", str(folder / "plan" / "program"), "--device", "cpu", "-q"]) == 0
