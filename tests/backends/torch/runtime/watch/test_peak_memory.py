"""The peak memory that a rank on a CPU reports is its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

MIB = 2**20
RANK = """
import torch
from autopipe.backends.torch.runtime.watch.report import peak_memory
held = torch.ones(64 * 2**18)
print(peak_memory(torch.device("cpu")))
"""
"""It holds 64 MiB."""


def test_what_the_process_has_that_starts_a_rank_is_not_counted() -> None:
    held = np.ones(512 * MIB, dtype=np.uint8)
    done = subprocess.run(
        [sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, check=True
    )
    assert 60 * MIB < int(done.stdout) < 160 * MIB
    assert held.all()
