"""Starting the ranks of a program through torch elastic."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Gang:
    """How the ranks of a program are spread and tied together."""

    nodes: int = 1
    ranks_per_node: int | None = None
    """The program's ranks shared equally among the nodes, where not given."""
    rendezvous_endpoint: str = ""
    rendezvous_id: str = ""
    max_restarts: int = 0


def launch_program(manifest: Manifest, arguments: list[str], gang: Gang) -> None:
    """Run the program's ranks of this node to their end. `arguments` are those of a rank's file.

    Raises LaunchError with the first failing rank's message.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=gang.nodes,
        max_nodes=gang.nodes,
        nproc_per_node=gang.ranks_per_node or manifest.world_size // gang.nodes,
        run_id=gang.rendezvous_id or uuid.uuid4().hex,
        rdzv_endpoint=gang.rendezvous_endpoint or "localhost:0",
        rdzv_backend="c10d",
        max_restarts=gang.max_restarts,
        monitor_interval=0.1,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        elastic_launch(config, sys.executable)("-u", str(manifest.folder / "run.py"), *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise LaunchError(
            failure.message.splitlines()[-1] if failure.message else "failed", where=f"rank {rank}"
        ) from error


def run_alone(folder: Path, arguments: list[str]) -> None:
    """Run a one-rank program in a process of its own. Raises LaunchError with the last line it wrote."""
    import subprocess

    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    done = subprocess.run(
        [sys.executable, "-u", str(folder / "run.py"), *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["failed without a word"]
        raise LaunchError(f"the one-device program failed: {lines[-1]}", where=str(folder))
