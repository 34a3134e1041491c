"""How a rank computes at each precision."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.api.plan_folder import open_prediction
from autopipe.backends.torch.runtime.step.precision import set_matmul_precision
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.support.alone import dry_run

CUBLAS: Any = torch.backends.cuda.matmul
CUDNN: Any = torch.backends.cudnn


def rounded() -> tuple[bool, bool]:
    """True where CUDA's products, and convolutions, may round fp32 operands to 19 bits, as torch
    itself says.
    """
    if hasattr(CUBLAS, "fp32_precision"):
        layers = {CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision}
        assert len(layers) == 1
        return CUBLAS.fp32_precision == "tf32", layers == {"tf32"}
    return CUBLAS.allow_tf32, CUDNN.allow_tf32


@pytest.fixture(autouse=True)
def _left_exact() -> Iterator[None]:
    yield
    set_matmul_precision("fp32")


def test_only_tf32_rounds_operands_and_nothing_that_is_verified_does() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        set_matmul_precision(precision)
        assert rounded() == (False, False)
    set_matmul_precision("tf32")
    assert rounded() == (True, True)
    assert CUBLAS.allow_bf16_reduced_precision_reduction
    set_matmul_precision("tf32", exact=True)
    assert rounded() == (False, False)
    assert not CUBLAS.allow_bf16_reduced_precision_reduction
    assert not CUBLAS.allow_fp16_reduced_precision_reduction


def test_tf32_goes_from_the_configuration_into_costs_and_ranks(tmp_path: Path) -> None:
    """A step takes less than in fp32 and more than in bf16 on a device that has units for each; a
    rank that records for `verify` computes in fp32 all the same.
    """
    model = tmp_path / "gpt.onnx"
    steps = {}
    sizes = {
        "layers": "1",
        "hidden": "256",
        "heads": "4",
        "sequence": "64",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", sizes)).save(model)
    for precision in ("fp32", "tf32", "bf16"):
        words = ["plan", str(model), "--gpus", "1", "--cluster", "a100-80gb", "--batch-size", "64"]
        words += [
            "--micro-batches",
            "1",
            "--strategy",
            "data_parallel",
            "--set",
            f"precision={precision}",
            "-q",
            "-o",
            str(tmp_path / precision),
        ]
        assert main(words) == 0
        _, timeline = open_prediction(tmp_path / precision)
        steps[precision] = timeline.end
    assert steps["bf16"] < steps["tf32"] < steps["fp32"]
    assert main(["codegen", str(tmp_path / "tf32"), "-q"]) == 0
    program = tmp_path / "tf32" / "program"
    assert (
        json.loads((program / "manifest.json").read_text(encoding="utf-8"))["precision"] == "tf32"
    )
    dry_run(program, 0, "--device", "cpu")
    assert rounded() == (True, True)
    dry_run(program, 0, "--device", "cpu", "--record", tmp_path / "record")
    assert rounded() == (False, False)
