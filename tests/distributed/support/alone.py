"""One rank of a program, in this process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.rank import Rank


def dry_run(folder: Path, number: int, *flags: object) -> Rank:
    """The rank as it is when it has ended."""
    with as_rank(folder, number, "--dry-run", *flags):
        rank = runpy.run_path(str(folder / f"rank_{number:03d}.py"), run_name="__main__")["rank"]
    assert isinstance(rank, Rank)
    return rank


@contextmanager
def as_rank(folder: Path, number: int, *flags: object) -> Iterator[None]:
    """The command line, environment and modules of the rank's process; nothing of them is left
    behind.
    """
    saved = dict(os.environ), list(sys.argv), sys.excepthook
    size = str(read_manifest(folder).world_size)
    world = {"RANK": str(number), "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    os.environ.update(world)
    sys.argv = ["rank", *map(str, flags)]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.argv = saved[1]
        sys.excepthook = saved[2]
        for name in world:
            os.environ.pop(name)
        os.environ.update(saved[0])
        for name in [name for name in sys.modules if name.startswith("stage_")]:
            del sys.modules[name]
        if dist.is_initialized():
            dist.destroy_process_group()
