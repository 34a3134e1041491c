"""`launch --dry-run`: run one step of one rank without the other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopipe.api.launch_checks import has_rank
from autopipe.api.launch_data import check_training_data
from autopipe.api.launch_settings import LaunchSettings
from autopipe.api.program_folder import rank_arguments
from autopipe.backends.torch import fake_cuda
from autopipe.backends.torch.launcher import run_single_rank
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import scratch_folder


def rehearse(manifest: Manifest, settings: LaunchSettings) -> dict[str, Any]:
    """Run one step of rank `settings.rank` (0 if it is None) without the other ranks, and return
    the report of the rank.

    Raises ConfigurationError if there is no program of this rank, or if the data do not fit the
    program.
    """
    rank = settings.rank or 0
    world_size = manifest.world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank {rank} does not exist", hint=f"use ranks 0 to {world_size - 1} of the program"
        )
    if not has_rank(manifest, rank):
        raise ConfigurationError(
            f"the program lacks the file of rank {rank}",
            hint=f"run autopipe codegen PLAN --ranks {rank}",
        )
    check_training_data(manifest, settings, lambda note: None)
    with scratch_folder("launch") as name:
        report = Path(name) / "report.json"
        arguments = rank_arguments(
            dry_run=True,
            steps=1,
            report=report,
            model=None if settings.model is None else settings.model.absolute(),
            device=settings.device,
            data=settings.data,
            seed=settings.seed,
        )
        run_single_rank(manifest.folder, arguments, rank, world_size, _fake_cuda(settings.device))
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _fake_cuda(device: str) -> Path | None:
    """Return the path of the library that simulates a CUDA device in a dry run, None if `device` is
    not "cuda" or this machine has a CUDA device.

    Raises ConfigurationError if the library cannot be built.
    """
    if device != "cuda":
        return None
    import torch

    from autopipe.passes.auto.plan_cache import cache_folder

    return None if torch.cuda.is_available() else fake_cuda.build(cache_folder())
