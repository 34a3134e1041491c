"""Starting the ranks of a program through torch elastic."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.backends.torch.runtime.failures import Failure, read_failure
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import AutopipeError, ConfigurationError, LaunchError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_ELASTIC_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")


@dataclass(frozen=True, slots=True)
class Gang:
    """How the ranks of a program are spread and tied together."""

    nodes: tuple[int, int] = (1, 1)
    """Fewest and most nodes; the program's world size fixes the number within."""
    ranks_per_node: int | None = None
    """The program's ranks shared equally among the nodes, where not given."""
    rendezvous_endpoint: str = ""
    rendezvous_id: str = ""
    max_restarts: int = 0
    live: bool = False
    """Rank 0's step lines go to this process's stdout."""
    debug: bool = False
    """Elastic's own log lines are shown."""


def local_ranks(manifest: Manifest, gang: Gang) -> tuple[int, int]:
    """(nodes, ranks on each). Raises ConfigurationError where they do not make up the program's world size."""
    low, high = gang.nodes
    world = manifest.world_size
    ranks = gang.ranks_per_node or (world // high if world % high == 0 else 0)
    if not ranks or world % ranks or not low <= world // ranks <= high:
        spread = f"{low}" if low == high else f"{low} to {high}"
        each = f" with {gang.ranks_per_node} ranks each" if gang.ranks_per_node else ""
        raise ConfigurationError(
            f"the program's {world} ranks do not fit {spread} nodes{each}",
            hint="nodes times --nproc-per-node must be the number of devices of the plan",
        )
    nodes = world // ranks
    if nodes > 1 and not gang.rendezvous_endpoint:
        raise ConfigurationError("several nodes need a meeting point", hint="--rdzv-endpoint HOST:PORT, alike on all")
    return nodes, ranks


def launch_program(manifest: Manifest, arguments: list[str], gang: Gang) -> None:
    """Run the program's ranks of this node to their end. `arguments` are those of a rank's file.

    Raises the first failing rank's error: ConfigurationError where the rank could not take what it was given,
    otherwise LaunchError; KeyboardInterrupt after Ctrl-C, when all ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes, ranks = local_ranks(manifest, gang)
    if not gang.debug:
        for name in _ELASTIC_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    logs = Path(tempfile.mkdtemp(prefix="autopipe-logs-"))
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=gang.rendezvous_id or f"autopipe-{manifest.plan[:12]}",
        rdzv_endpoint=gang.rendezvous_endpoint or "localhost:0",
        rdzv_backend="c10d",
        max_restarts=gang.max_restarts,
        monitor_interval=0.1,
        logs_specs=_logs(logs, ranks, gang),
    )
    try:
        with _rank_environment():
            elastic_launch(config, sys.executable)("-u", str(manifest.folder / "run.py"), *arguments)
    except ChildFailedError as error:
        raise _first_error(error.failures, logs) from error
    except SignalException as error:
        shutil.rmtree(logs, ignore_errors=True)
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise LaunchError(f"stopped by {error.sigval.name}") from error
    except (RendezvousError, OSError) as error:
        raise LaunchError(f"the nodes did not meet: {error}", hint="another node may have stopped the run") from error
    else:
        shutil.rmtree(logs, ignore_errors=True)


@contextmanager
def _rank_environment() -> Iterator[None]:
    """The environment that ranks inherit: one thread each, this same autopipe, and modules of the working folder."""
    root = Path(__file__).resolve().parents[3]
    before = os.environ.get("PYTHONPATH", "")
    # An installed autopipe is found anyhow, and site-packages must not come before the standard library.
    paths = [before, "" if root.name in ("site-packages", "dist-packages") else str(root), os.getcwd()]
    changes = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _logs(folder: Path, ranks: int, gang: Gang) -> LogsSpecs:
    """What ranks write goes to files, but for rank 0's step lines where they are asked for."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    redirects = dict.fromkeys(range(ranks), Std.ALL)
    if gang.live:
        redirects[0] = Std.ERR
    return DefaultLogsSpecs(log_dir=str(folder), redirects=redirects)


def _first_error(failures: Mapping[int, ProcessFailure], logs: Path) -> AutopipeError:
    """The error of the rank that failed first and not because another one had."""
    found = [_failure(rank, failure, logs) for rank, failure in failures.items()]
    first = min(found, key=lambda failure: (failure.consequence, failure.time))
    error = first.error()
    if error.exit_code == LaunchError.exit_code and not error.hint:
        error.hint = f"what each rank wrote is in {logs}"
    else:
        shutil.rmtree(logs, ignore_errors=True)
    return error


def _failure(rank: int, failure: ProcessFailure, logs: Path) -> Failure:
    written = read_failure(failure.error_file_data)
    if written is not None:
        return written
    name = failure.signal_name() if failure.exitcode < 0 else ""
    message = f"killed by {name}" if name else _last_words(logs, failure)
    hint = "the machine may be out of memory" if name == "SIGKILL" else ""
    # Elastic stops the ranks that are left with SIGTERM.
    return Failure(rank, "", message, hint, "", failure.timestamp, LaunchError.exit_code, name == "SIGTERM")


def _last_words(logs: Path, failure: ProcessFailure) -> str:
    """The last line that a rank wrote before it ended: it failed before it could say more."""
    files = sorted(logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").split("\n") if files else []
    return next((line for line in reversed(lines) if line.strip()), f"ended with exit code {failure.exitcode}")


def run_alone(folder: Path, arguments: list[str]) -> None:
    """Run a one-rank program in a process of its own. Raises LaunchError with the last line it wrote."""
    with _rank_environment():
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


def read_reports(path: Path) -> list[dict[str, object]]:
    """The reports of the steps in a report file, one a step: a step done again after a restart counts once."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [report for _, report in sorted({int(line["step"]): line for line in lines}.items())]
