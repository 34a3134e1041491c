"""The emitted forward and backward of every node case that ships with ONNX, on fake CUDA tensors:
in float32 and under CUDA's autocast, whose types are not those of the CPU, devices are never mixed,
and nothing runs on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.support.launching import ROOT
from tests.fake_cuda.watching import forbidden

WITHOUT_BIAS = {
    "test_lstm_batchwise",
    "test_lstm_bidirectional",
    "test_lstm_defaults",
    "test_lstm_reverse",
}
"""Torch's fake tensors have no LSTM without a bias; CUDA has."""
SHARES = 2


@pytest.mark.conformance
@pytest.mark.timeout(600)  # Of a suite whose other tests take the processors too.
@pytest.mark.parametrize("share", range(SHARES))
def test_all_stays_on_the_device(fake_cuda_library: Path, tmp_path: Path, share: int) -> None:
    path = tmp_path / "found.jsonl"
    script = Path(__file__).with_name("cases.py")
    words = [fake_cuda_library, script, path, share, SHARES]
    command = [sys.executable, "-m", "autopipe.backends.torch.fake_cuda", *map(str, words)]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
    rows = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    for precision in ("fp32", "bf16"):
        assert len({row["case"] for row in rows if row["precision"] == precision}) > 700
    assert {row["case"] for row in rows if row["needs_values"]} == set()
    assert {row["case"] for row in rows if row["error"]} <= WITHOUT_BIAS, rows
    wrong = {row["case"]: lines for row in rows if (lines := forbidden(row["found"]))}
    assert not wrong, json.dumps(wrong, indent=1)
