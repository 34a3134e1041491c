"""Start of the ranks of a program, through torch elastic, and reading of their report files."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopipe.backends.torch.fork_server import ForkServer, fork_server, rank_environment
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.watch.failures import (
    ERROR_FILE_VARIABLE,
    Failure,
    read_failure,
)
from autopipe.backends.torch.runtime.watch.heartbeat import DEFAULT_TIMEOUTS, Timeouts
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.output_files import keep_folder, scratch_folder
from autopipe.ir.words import plural

_REPLACED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Settings of a launch on this node."""

    nodes: tuple[int, int] = (1, 1)
    """Minimum and maximum number of nodes. The number in this range follows from the program's
    world size and the ranks per node.
    """
    ranks_per_node: int | None = None
    """Number of ranks per node. None: the program's world size divided by the maximum number of
    nodes.
    """
    rendezvous_endpoint: str = ""
    rendezvous_id: str = ""
    rendezvous_key: bytes = field(default=b"", repr=False)
    """Secret of all nodes of the launch, which signs their messages."""
    node: int | None = None
    """Number of this node, from 0."""
    local_address: str = ""
    """Address of this node for the other nodes; "" for the address from which this node reaches the
    endpoint.
    """
    hosts: tuple[str, ...] = ()
    """Names of the nodes by number; empty if no job manager provides them."""
    gpus: int = 0
    """Number of GPUs of this node that its ranks may use."""
    max_restarts: int = 0
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    """Time limits per phase; a rank that exceeds one of them counts as hanging."""
    live: bool = False
    """True if the stdout of rank 0 is the stdout of this process. Otherwise it goes to a file."""
    debug: bool = False
    """True if log lines of torch elastic are printed."""
    saves: bool = False
    """True if ranks that are asked to stop save a last checkpoint."""


def local_ranks(manifest: Manifest, config: LaunchConfig) -> tuple[int, int]:
    """Return (number of nodes, ranks per node) for a launch of the program. Raise
    ConfigurationError if the program's world size does not fit the settings, or if settings that
    several nodes require are missing.
    """
    low, high = config.nodes
    world = manifest.world_size
    ranks = config.ranks_per_node or (world // high if world % high == 0 else 0)
    if not ranks or world % ranks or not low <= world // ranks <= high:
        spread = f"{low}" if low == high else f"{low} to {high}"
        each = (
            f" with {config.ranks_per_node} {plural(config.ranks_per_node, 'rank')} each"
            if config.ranks_per_node
            else ""
        )
        hint = (
            "set nodes and --nproc-per-node so that their product is the number of devices of "
            "the plan"
        )
        raise ConfigurationError(
            f"the program's {world} {plural(world, 'rank')} cannot be divided over {spread} "
            f"{plural(high, 'node')}{each}",
            hint=hint,
        )
    nodes = world // ranks
    if config.node is not None and config.node >= nodes:
        raise ConfigurationError(
            f"--node-rank is {config.node}, but the number of nodes is {nodes}",
            hint="number the nodes from 0",
        )
    if nodes > 1 and not config.rendezvous_endpoint:
        raise ConfigurationError(
            "a run on several nodes requires a rendezvous endpoint",
            hint="set --rdzv-endpoint HOST:PORT to one value on all nodes",
        )
    if nodes > 1 and not config.rendezvous_key:
        raise ConfigurationError(
            "a run on several nodes requires a rendezvous key",
            hint="set --rdzv-key FILE to equal files on all nodes",
        )
    return nodes, ranks


def launch_program(
    manifest: Manifest,
    arguments: list[str],
    config: LaunchConfig,
    note: Callable[[str], None] = lambda _: None,
    poll: Callable[[], None] = lambda: None,
    server: ForkServer | None = None,
) -> None:
    """Run the ranks of a program on this node until they end.

    `arguments` are the command-line arguments of each rank. `note` is called with a text for the
    user after a restart. `poll` is called several times per second while the ranks run, and once at
    the end. `server` forks the ranks; if it is None, a fork server is started for this launch.

    Raise the error of the first rank that failed: ConfigurationError if the rank rejected its
    inputs, otherwise LaunchError. After Ctrl-C, raise KeyboardInterrupt when all ranks have ended.
    """
    if server is None:
        with fork_server() as own:
            launch_program(manifest, arguments, config, note, poll, own)
        return
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from autopipe.backends.torch.elastic_agent import run_agent
    from autopipe.backends.torch.rendezvous import RendezvousConfig

    nodes, ranks = local_ranks(manifest, config)
    command = (str(manifest.folder / "run.py"), *arguments)
    name = config.rendezvous_id or f"autopipe-{manifest.plan[:12]}"
    place = RendezvousConfig()
    if nodes > 1:
        place = RendezvousConfig(
            nodes,
            config.rendezvous_endpoint,
            name,
            config.rendezvous_key,
            config.node,
            config.local_address,
            config.gpus,
            config.hosts,
            config.timeouts.start_s,
        )
    timeouts = config.timeouts
    stop_s = timeouts.step_s + timeouts.checkpoint_s if config.saves else 0.0
    failure: Failure | None = None
    try:
        with scratch_folder("logs") as logs, rank_environment(), _isolate_elastic(config.debug):
            failure = run_agent(
                command,
                ranks,
                place,
                config.max_restarts,
                timeouts,
                logs,
                config.live,
                note,
                poll,
                stop_s,
                server,
            )
            if failure is not None and not failure.final:
                keep_folder(logs)
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise LaunchError(f"the run was stopped by {error.sigval.name}") from error
    except RendezvousError as error:
        if isinstance(error.__cause__, LaunchError):
            raise error.__cause__ from error
        raise LaunchError(
            f"the rendezvous of the nodes failed: {error}",
            hint="check whether another node ended the run",
        ) from error
    finally:
        poll()
    if failure is not None:
        failed = failure.error()
        if not failure.final:
            failed.hint = failed.hint or f"what each rank wrote is in {logs}"
        raise failed


@contextmanager
def _isolate_elastic(debug: bool) -> Iterator[None]:
    """Context manager that restores the signal handlers that torch elastic replaces. Unless `debug`
    is set, it suppresses elastic's log lines.
    """
    saved = {each: signal.getsignal(each) for each in _REPLACED_SIGNALS}
    # The loggers of elastic's modules pass their lines to this common parent logger, so a handler
    # here suppresses all of them.
    logger = logging.getLogger("torch.distributed.elastic")
    nowhere = logging.NullHandler()
    propagate = logger.propagate
    if not debug:
        logger.addHandler(nowhere)
        logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(nowhere)
        for each, handler in saved.items():
            signal.signal(each, handler)


def run_child(
    words: Sequence[str], changes: dict[str, str], server: ForkServer | None = None
) -> str:
    """Run a child process until it ends. `words` is a Python file or module and its arguments, as
    for `python_command`. `changes` are environment variables to set. `server` forks the process;
    without it, the process is a new interpreter. Return "" if the process succeeds, otherwise the
    last line of its stderr.
    """
    # A `ForkServer` that is not open starts a new Python interpreter.
    starter = server or ForkServer()
    with tempfile.TemporaryFile("w+") as errors, open(os.devnull, "r+") as nothing:
        process = starter.start(list(words), os.environ | changes, (nothing, nothing, errors))
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return (lines or ["failed without a word"])[-1] if code else ""


def run_single_rank(
    folder: Path,
    arguments: list[str],
    rank: int = 0,
    world_size: int = 1,
    fake_cuda: Path | None = None,
    server: ForkServer | None = None,
) -> None:
    """Run one rank of the program in `folder` in a child process and wait until it ends: the only
    rank of a program, or one rank of a dry run.

    `fake_cuda` is the library of the simulated CUDA device on which the rank runs, or None.
    `server` forks the process; without it, the process is a new interpreter. Raise the error of the
    rank if it fails.
    """
    with scratch_folder("rank") as scratch, rank_environment():
        failed = Path(scratch) / "error.json"
        world = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
        }
        changes = {name: str(value) for name, value in world.items()} | {
            ERROR_FILE_VARIABLE: str(failed)
        }
        device = () if fake_cuda is None else ("autopipe.backends.torch.fake_cuda", str(fake_cuda))
        last_words = run_child((*device, str(folder / "run.py"), *arguments), changes, server)
        if not last_words:
            return
        failure = (
            read_failure(json.loads(failed.read_text(encoding="utf-8")))
            if failed.exists()
            else None
        )
    raise LaunchError(last_words, where=str(folder)) if failure is None else failure.error()


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Return the records of the steps in a report file, in ascending order of the steps. If a step
    ran again after a restart, its last record is returned.
    """
    return _records_by_step(path, evaluations=False)


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Return the records of the validations in a report file, in ascending order of their steps. If
    a validation ran again after a restart, its last record is returned.
    """
    return _records_by_step(path, evaluations=True)


def _records_by_step(path: Path, evaluations: bool) -> list[dict[str, Any]]:
    """Return the last record of each step in a report file, in ascending order of the steps:
    records of validations if `evaluations` is set, otherwise records of steps. Return an empty list
    if the file does not exist.
    """
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    found = {
        int(line["step"]): line
        for line in lines
        if "step" in line and ("eval_loss" in line) is evaluations
    }
    return [report for _, report in sorted(found.items())]


class ReportFollower:
    """Reader of a report file to which rank 0 still appends lines."""

    def __init__(self, path: Path, takers: Sequence[Callable[[dict[str, Any]], None]]) -> None:
        """`takers` are functions that `poll` calls with each record of the file: the metrics of a
        step, or a note for the user.
        """
        self._path = path
        self._takers = takers
        self._read = 0  # Number of bytes of the file that have been read.

    def poll(self) -> None:
        """Pass the records of all lines that were completed since the last call to the
        functions.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            for take in self._takers:
                take(record)


def read_times(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the task times that the ranks of this node have written to `folder`: by rank, one
    record per step (see `runtime/watch/report.py`).
    """
    return {
        int(path.stem.removeprefix("rank_")): read_reports(path)
        for path in sorted(folder.glob("rank_*.jsonl"))
    }
