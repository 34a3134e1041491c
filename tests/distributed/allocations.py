"""What one rank of a program really allocates: a dry run of it, each allocation of torch's counted."""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from autopipe.backends.torch.runtime.buckets import buckets_of_rank
from autopipe.backends.torch.runtime.manifest import read_manifest

STEPS = 2
"""In the second one there is all that the optimizer keeps."""


def peak_of_rank(folder: Path, rank: int) -> int:
    """Most bytes that torch had allocated at once for a rank on the CPU, in this process."""
    manifest = read_manifest(folder)
    gc.collect()
    with (
        _as_rank(folder, rank, manifest.world_size),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        runpy.run_path(str(folder / f"rank_{rank:03d}.py"), run_name="__main__")
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = (each for each in run.profiler.kineto_results.events() if each.name() == "[memory]")
    used = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        used += event.nbytes()
        most = max(most, used)
    return most + _read_bytes(folder, rank)


def _read_bytes(folder: Path, rank: int) -> int:
    """Parameters are numpy's, whom torch does not ask for memory; but for those that move into rows of shares."""
    manifest = read_manifest(folder)
    total = 0
    moved: set[int] = set()
    if manifest.optimizer["shard"]:
        moved.update(block.parameter for bucket in buckets_of_rank(manifest, rank) for block in bucket.blocks)
    for shard in manifest.shards[rank]:
        if shard.parameter in moved:
            continue
        size = getattr(torch, manifest.parameters[shard.parameter].dtype).itemsize
        for start, stop in zip(shard.starts, shard.stops, strict=True):
            size *= stop - start
        total += size
    return total


@contextmanager
def _as_rank(folder: Path, rank: int, world_size: int) -> Iterator[None]:
    """The command line, environment and modules of the rank's process."""
    saved = dict(os.environ), list(sys.argv), sys.excepthook
    world = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ.update(world)
    sys.argv = ["rank", "--dry-run", "--device", "cpu", "--steps", str(STEPS)]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.argv, sys.excepthook = saved[1], saved[2]
        for name in world:
            os.environ.pop(name)
        os.environ.update(saved[0])
        for name in [name for name in sys.modules if name.startswith("stage_")]:
            del sys.modules[name]
        if dist.is_initialized():
            dist.destroy_process_group()
