"""What one rank of a program really allocates: a dry run of it, each allocation of torch's
counted.
"""

from __future__ import annotations

import gc
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.step.gradients import buckets_of_rank
from tests.distributed.support.alone import dry_run

STEPS = 2
"""In the second one there is all that the optimizer keeps."""


def peak_of_rank(folder: Path, rank: int) -> int:
    """Most bytes that torch had allocated at once for a rank on the CPU, in this process."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        dry_run(folder, rank, "--device", "cpu", "--steps", STEPS)
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = (each for each in run.profiler.kineto_results.events() if each.name() == "[memory]")
    used = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        used += event.nbytes()
        most = max(most, used)
    return most + _read_bytes(folder, rank)


def _read_bytes(folder: Path, rank: int) -> int:
    """Parameters are numpy's, whom torch does not ask for memory; but for those that move into rows
    of shares, and in inference those that are held in 16 bits.
    """
    manifest = read_manifest(folder)
    total = 0
    moved = set() if manifest.train else set(manifest.low_precision)
    if manifest.optimizer["shard"]:
        moved.update(
            block.parameter for bucket in buckets_of_rank(manifest, rank) for block in bucket.blocks
        )
    for shard in manifest.shards[rank]:
        if shard.parameter in moved:
            continue
        total += shard.box.elements * manifest.parameters[shard.parameter].value.dtype.itemsize
    return total
