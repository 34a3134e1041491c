"""Measurements that run in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from autopipe.backends.torch.child import python_command
from autopipe.backends.torch.launcher import rank_environment
from autopipe.ir.errors import LaunchError


def numbers_of(worker: str, program: Path, setting: str, seconds: float) -> list[float]:
    """Run the module `worker` of this package on a program for about `seconds` and return its numbers; `setting` names
    the case. Raises LaunchError with the last line that it wrote where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch, rank_environment():
        found = Path(scratch) / "numbers.json"
        module = f"autopipe.backends.torch.profiler.{worker}"
        done = subprocess.run(
            python_command(module, str(found), str(program), setting, str(seconds)),
            env=dict(os.environ) | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["failed without a word"]
            raise LaunchError(f"a program cannot be measured: {lines[-1]}")
        numbers: list[float] = json.loads(found.read_text(encoding="utf-8"))
    return numbers
