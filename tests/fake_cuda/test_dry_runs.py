"""`launch --dry-run --device cuda` without a GPU does what `--device meta` does, on fake tensors
that are on `cuda`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.backends.torch.runtime.modes.test_dry_run import PLANS, SIZES, generated
from tests.distributed.support.alone import dry_run

if torch.cuda.is_available():
    pytest.skip("dry runs are on the GPU", allow_module_level=True)


@pytest.mark.parametrize("flags", PLANS.values(), ids=PLANS)
def test_a_rank_does_the_same_as_on_meta(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fake_cuda_library: Path,
    flags: tuple[str, ...],
) -> None:
    build(configure("gpt", SIZES)).save(tmp_path / "gpt.onnx")
    program = generated(tmp_path / "gpt.onnx", tmp_path / "plan", *flags)
    capsys.readouterr()
    assert (
        main(["launch", str(program), "--dry-run", "--device", "cuda", "--rank", "3", "--json"])
        == 0
    )
    on_cuda = capsys.readouterr().out
    on_meta = tmp_path / "meta.json"
    dry_run(program, 3, "--device", "meta", "--report", on_meta)
    reports: list[dict[str, Any]] = [
        json.loads(text) for text in (on_meta.read_text(encoding="utf-8"), on_cuda)
    ]
    peaks = [report.pop("peak_memory_bytes") for report in reports]
    assert reports[0] == reports[1] and reports[0]["communication_bytes"]["gradient"]
    # Attention is another kernel, and batches are copied to the device.
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
