"""Processes that run one program after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.api.synthetic_programs import write_pair
from autopipe.backends.torch.runtime.data.sources import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from benchmarks.worker_pool import WorkerPool


@pytest.mark.distributed
def test_every_step_of_every_program_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program"
    data = tmp_path / "samples.npz"
    write_pair(program, 2)
    save_samples(read_manifest(program), data)
    with WorkerPool(2) as pool:
        for steps in (5, 1, 3):
            assert len(pool.run(program, data, steps, (0, 1), 60.0).steps_s) == steps
