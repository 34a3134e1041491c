"""An extension of torch elastic's agent. It does not retry failures that would recur, and it
detects hanging ranks.

Elastic restarts all ranks after every failure. This agent does not restart them after a final
failure, for example a missing data file, because the next attempt would fail again.

Each rank writes heartbeats (its current task and the time) to a file. A rank hangs in three cases:
it makes no progress in a task that waits for no other rank (an endless loop); its heartbeats end
(the process is stopped, or is stuck while it holds Python's global lock); or it never starts. Ranks
that wait for other ranks are reported only if all ranks wait; then the rank that has waited longest
is reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from autopipe.backends.torch.child import PARENT_VARIABLE, python_command, temporary_environment
from autopipe.backends.torch.fork_server import ForkedProcess, ForkServer
from autopipe.backends.torch.rendezvous import RendezvousConfig, RendezvousHandler
from autopipe.backends.torch.runtime.communication.signed_store import KEY_VARIABLE
from autopipe.backends.torch.runtime.communication.transport import ATTEMPT_VARIABLE
from autopipe.backends.torch.runtime.job import NETWORK_VARIABLES, interface_variables
from autopipe.backends.torch.runtime.watch.failures import (
    STACKS_SIGNAL,
    STOP_SIGNAL,
    Failure,
    read_failure,
)
from autopipe.backends.torch.runtime.watch.heartbeat import (
    ENDED_TASK,
    HEARTBEAT_FOLDER_VARIABLE,
    HeartbeatRecord,
    Timeouts,
    heartbeat_file,
    phase_of,
    read_heartbeat,
)
from autopipe.backends.torch.torch_interfaces import replace_process_start
from autopipe.ir.errors import LaunchError
from autopipe.ir.words import plural

_LOOK_INTERVAL_S = 0.25
_SUSPENSION_S = 5.0
"""Maximum seconds between two calls of `Watchdog.check` in normal operation. If more time passes,
this process was suspended, and possibly the ranks too, so the timeouts start again.
"""


def _task_text(task: str) -> str:
    """Return the words for a task in messages: `task 0F3` for a task of a stage, otherwise a phase
    such as `its start`.
    """
    return f"task {task}" if task[:1].isdigit() else f"its {task or 'start'}"


def wait_chain_text(records: Mapping[int, HeartbeatRecord], rank: int) -> str:
    """Return the chain of waiting ranks that starts at `rank`, as text: the rank for which `rank`
    waits, the rank for which that rank waits, and so on.

    The chain ends at a rank that already occurs in it, that waits for a process group, or that runs
    on another node. Return "" if `rank` does not wait for one particular rank. `records` has the
    heartbeats of this node's ranks.
    """
    parts: list[str] = []
    seen: set[int] = set()
    while rank in records and rank not in seen and (record := records[rank]).peer >= 0:
        seen.add(rank)
        peer = records.get(record.peer)
        state = ", of another node" if peer is None else f", which waits in {_task_text(peer.task)}"
        parts.append(f"for rank {record.peer} (channel {record.channel}){state}")
        rank = record.peer
    if parts and rank in records and rank not in seen:
        parts.append("for its group")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that hangs, with its task and the seconds for which it has hung."""

    rank: int
    task: str
    """Task of the rank; "" if the rank has not started."""
    seconds: float
    waits: bool = False
    """True if this rank waits for other ranks, and so do all other ranks of this node."""
    chain: str = ""
    """Result of `wait_chain_text` for this rank: the chain of ranks that wait for one another."""
    host: str = ""
    """Name of this machine; empty if the launch has one node."""

    def message(self) -> str:
        """Return the message of the error for this rank."""
        name = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.waits:
            chain = f": {self.chain}" if self.chain else ""
            return (
                f"{name} waits in {_task_text(self.task)} for {self.seconds:.0f} s, and so do all "
                f"others{chain}"
            )
        return f"{name} hangs in {_task_text(self.task)} for {self.seconds:.0f} s"

    def failure(self, logs: Path) -> Failure:
        """Return the failure that ends the attempt. It is not final, so the ranks may be restarted.
        `logs` is the folder of the ranks' output, which the hint names.
        """
        hint = (
            f"--{phase_of(self.task)}-timeout allows more time; what each rank wrote, and was "
            f"doing, is in {logs}"
        )
        code = LaunchError.exit_code
        return Failure(
            self.rank,
            self.task,
            self.message(),
            hint,
            "",
            time.time(),
            code,
            final=False,
            consequence=False,
        )


def find_hung_rank(
    records: Mapping[int, HeartbeatRecord | None],
    began: float,
    now: float,
    timeouts: Timeouts,
    nodes: int,
) -> HungRank | None:
    """Return the rank that hangs, or None. If several ranks hang, return the one that has hung
    longest.

    `records` has the latest heartbeat of each rank of this node, or None for a rank that has not
    written any. `began` is the time at which the ranks started. If all ranks of this node wait, the
    timeout applies to each of them. It is doubled if there are other nodes, because the cause may
    be a rank of another node, whose agent then reports it first.
    """
    running = {
        rank: record
        for rank, record in records.items()
        if record is None or record.task != ENDED_TASK
    }
    found = []
    for rank, record in running.items():
        if record is None:
            hang = HungRank(rank, "", now - began)
            limit = timeouts.start_s
        else:
            last = record.at if record.waits else min(record.at, record.since)
            hang = HungRank(rank, record.task, now - last)
            limit = timeouts.seconds_for_task(record.task)
        if hang.seconds > limit:
            found.append(hang)
    patience = 1 if nodes == 1 else 2
    waiting = [
        HungRank(rank, record.task, now - record.since, waits=True)
        for rank, record in running.items()
        if record is not None
        and record.waits
        and now - record.since > patience * timeouts.seconds_for_task(record.task)
    ]
    if not found and len(waiting) == len(running):
        known = {rank: record for rank, record in running.items() if record is not None}
        found = [replace(hang, chain=wait_chain_text(known, hang.rank)) for hang in waiting]
    return max(found, key=lambda hang: hang.seconds, default=None)


@dataclass(slots=True)
class Watchdog:
    """Checks the heartbeats of the ranks of this node. `folder` contains the heartbeat files, and
    `nodes` is the number of nodes.
    """

    folder: Path
    ranks: tuple[int, ...]
    timeouts: Timeouts
    nodes: int
    _began: float = field(default_factory=time.monotonic)
    _looked: float = field(default_factory=time.monotonic)

    def check(self) -> HungRank | None:
        """Return the rank that hangs, or None. The files are read at most once per
        `_LOOK_INTERVAL_S`; calls in between return None.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_INTERVAL_S:
            return None
        if now - self._looked > _SUSPENSION_S:
            self._began = now
        self._looked = now
        records: dict[int, HeartbeatRecord | None] = {}
        for rank in self.ranks:
            record = read_heartbeat(heartbeat_file(self.folder, rank))
            if record is not None:
                # Times before `_began`, the start of watching, are replaced by it. Otherwise the
                # launcher would blame a rank for time in which the processes were suspended.
                record = replace(
                    record, at=max(record.at, self._began), since=max(record.since, self._began)
                )
            records[rank] = record
        hang = find_hung_rank(records, self._began, now, self.timeouts, self.nodes)
        return hang and replace(hang, host=socket.gethostname() if self.nodes > 1 else "")


_POLL_S = 0.1
_STACK_DUMP_S = 0.5
"""Seconds that a hanging rank gets to write the stacks of its threads, before it is killed."""


_NETWORK_KEY = "AUTOPIPE_NETWORK"


def network_of_ranks(first: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the network variables that the ranks of this node take over from the first node.
    `first` has the variables of the first node, and `own` those that are set on this node, which
    take precedence.
    """
    return {
        name: str(first[name]) for name in NETWORK_VARIABLES if name in first and name not in own
    }


class RankAgent(LocalElasticAgent):
    """Elastic agent for the ranks of this node. It restarts them after a failure, except after a
    final one.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: Path,
        redirects: dict[int, Std],
        timeouts: Timeouts | None,
        note: Callable[[str], None],
        poll: Callable[[], None],
        network: Mapping[str, str],
        stop_s: float = 0.0,
    ) -> None:
        """`logs` is the folder of the ranks' output. `timeouts` is None if hanging ranks are not
        detected. `note` reports a restart to the user. `poll` is called each time that the agent
        looks at the ranks. `network` has the network variables that the user has set on this node.
        `stop_s` is the number of seconds that ranks get to save a checkpoint after a request to
        stop; 0 if they save none.
        """
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(logs), redirects=redirects))
        self._logs = logs
        self._timeouts = timeouts
        self._note = note
        self._network = network
        self._poll = poll
        self._watch: Watchdog | None = None
        self._hang: HungRank | None = None
        self._stop_s = stop_s
        self.failure: Failure | None = None
        """The failure that ended the latest attempt, or None."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, with the network variables of the first node and, if timeouts are set, a
        watchdog.
        """
        # Torch 2.13 uses one store for all attempts, in which gloo would find the addresses of the
        # previous attempt's ranks. So a random token identifies the attempt. The number of restarts
        # is not suitable, because it can differ between nodes.
        store: Any = worker_group.store
        if worker_group.group_rank == 0:
            store.set(ATTEMPT_VARIABLE, uuid.uuid4().hex)
            store.set(_NETWORK_KEY, json.dumps(dict(self._network)))
        os.environ[ATTEMPT_VARIABLE] = store.get(ATTEMPT_VARIABLE).decode()
        os.environ |= network_of_ranks(json.loads(store.get(_NETWORK_KEY)), self._network)
        self._hang = None
        if self._timeouts is None:
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]
        folder = Path(tempfile.mkdtemp(prefix="heartbeats_", dir=self._logs))
        with temporary_environment({HEARTBEAT_FOLDER_VARIABLE: str(folder)}):
            started: dict[int, Any] = super()._start_workers(worker_group)
        ranks = tuple(worker.global_rank for worker in worker_group.workers)
        self._watch = Watchdog(folder, ranks, self._timeouts, worker_group.group_world_size or 1)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks. Kill a rank that hangs. After a failure, record it and
        decide whether the ranks may be restarted.
        """
        self._poll()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and self._hang is None and self._watch is not None:
            self._hang = self._watch.check()
            if self._hang is not None:
                self._kill_hung_rank(worker_group, self._hang.rank)
        if result.state is WorkerState.FAILED:
            self.failure = (
                self._hang.failure(self._logs)
                if self._hang
                else first_failure(result.failures, self._logs)
            )
            if self.failure.final:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                left = self._remaining_restarts - 1
                self._note(
                    f"{self.failure.error()}; starting all ranks again, {left} "
                    f"{plural(left, 'restart')} left after this"
                )
        return result

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *further: Any, **options: Any
    ) -> None:
        """Stop all ranks. After Ctrl-C or SIGTERM, which elastic raises as SignalException, ranks
        that save checkpoints write a last checkpoint before they end. A second Ctrl-C ends the
        ranks at once.

        `further`, `options`: further arguments of elastic, passed on unchanged. Torch 2.13 passes a
        time limit; torch 2.11 passes the signal only and accepts nothing else.
        """
        if (
            self._stop_s
            and isinstance(sys.exception(), SignalException)
            and self._pcontext is not None
        ):
            for pid in self._pcontext.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STOP_SIGNAL)
            stop_s = self._stop_s
            self._stop_s = 0.0
            self._pcontext.wait(timeout=stop_s, period=_POLL_S)
        super()._shutdown(death_sig, *further, **options)

    def _kill_hung_rank(self, worker_group: WorkerGroup, rank: int) -> None:
        """Let a hanging rank write the stacks of its threads, then kill its process group with
        SIGKILL, because it may ignore all other signals. Elastic then ends the other ranks.
        """
        pid = next(worker.id for worker in worker_group.workers if worker.global_rank == rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            time.sleep(_STACK_DUMP_S)
            os.killpg(pid, signal.SIGKILL)


def run_agent(
    command: tuple[str, ...],
    ranks: int,
    place: RendezvousConfig,
    max_restarts: int,
    timeouts: Timeouts | None,
    logs: Path,
    live: bool,
    note: Callable[[str], None],
    poll: Callable[[], None] = lambda: None,
    stop_s: float = 0.0,
    server: ForkServer | None = None,
) -> Failure | None:
    """Join the rendezvous with the other nodes and run `ranks` processes of `command` on this node
    until they end.

    `command` is a Python file or module with its arguments, as for `python_command`. With
    `timeouts`, a rank that hangs counts as failed. `note` reports restarts to the user. `poll` is
    called each time that the agent looks at the ranks. `stop_s` is the number of seconds that ranks
    get to save a checkpoint after a request to stop; 0 if they save none. If `server` has been
    opened, it forks the ranks; otherwise each rank is a new interpreter. The output of the ranks is
    written to files in `logs`, except the stdout of the node's first rank if `live` is set.

    Return the failure that ended the ranks, or None if all ranks succeeded. Raise torch's
    SignalException after a signal, RendezvousError if the rendezvous fails before any rank has
    failed, and LaunchError if another node ended the run.
    """
    handler = RendezvousHandler(place, ranks)
    entry, *words = python_command(*command)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=entry,
        args=tuple(words),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=_POLL_S,
    )
    redirects = dict.fromkeys(range(ranks), Std.ALL) | ({0: Std.ERR} if live else {})
    network = {name: os.environ[name] for name in NETWORK_VARIABLES if os.environ.get(name)}
    # A `ForkServer` that is not open starts a new Python interpreter per rank.
    starter = server or ForkServer()

    def start(
        command: tuple[str, ...],
        variables: dict[str, str],
        output: IO[str] | None,
        errors: IO[str] | None,
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        return starter.start(
            list(command[len(python_command()) :]), variables, (None, output, errors)
        )

    agent = RankAgent(spec, logs, redirects, timeouts, note, poll, network, stop_s)
    try:
        with (
            temporary_environment(_ranks_environment(handler, place)),
            replace_process_start(start),
        ):
            result = agent.run()
    except SignalException:
        # A signal ends only this node. The rendezvous stays open, because the other nodes may
        # continue with a node that replaces this node.
        raise
    except RendezvousError:
        # The rendezvous for the first or a further attempt failed. If a rank failed before, its
        # failure explains more than this error does.
        handler.shutdown()
        if agent.failure is None:
            raise
        return agent.failure
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()
    if result is None:
        raise LaunchError("another node ended the run")
    return agent.failure if result.is_failed() else None


def _ranks_environment(handler: RendezvousHandler, place: RendezvousConfig) -> dict[str, str]:
    """Return the environment variables for the ranks. On a single node, the ranks listen on the
    network interface of this node's address. With several nodes, they listen on the interfaces that
    the user's environment names, if it names any.
    """
    found = {
        PARENT_VARIABLE: str(os.getpid()),
        KEY_VARIABLE: handler.signer.key.hex(),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
    }
    return found | interface_variables(
        {} if place.nodes == 1 else os.environ, lambda: handler.address
    )


def first_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> Failure:
    """Return the earliest failure that is not a consequence of another failure, or the earliest
    failure if all of them are consequences. `failures` are elastic's failures by rank.
    """
    found = [_failure_of_process(rank, failure, logs) for rank, failure in failures.items()]
    return min(found, key=lambda failure: (failure.consequence, failure.time))


def _failure_of_process(rank: int, failure: ProcessFailure, logs: Path) -> Failure:
    """Return the failure of a rank: the report that the rank wrote or, without a report, a
    description of how its process ended.
    """
    written = read_failure(failure.error_file_data)
    if written is not None:
        return written
    name = failure.signal_name() if failure.exitcode < 0 else ""
    message = f"killed by {name}"
    hint = "the machine may be out of memory" if name == "SIGKILL" else ""
    # The process ended without an error report, so the last line of its stderr is the best message
    # available.
    if not name:
        files = sorted(
            logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"),
            key=lambda path: path.stat().st_mtime,
        )
        lines = files[-1].read_text(encoding="utf-8", errors="replace").split("\n") if files else []
        message = next(
            (line for line in reversed(lines) if line.strip()),
            f"ended with exit code {failure.exitcode}",
        )
    # After a failure, elastic stops the remaining ranks with SIGTERM. So the end of a rank by
    # SIGTERM is a consequence of another rank's failure.
    stopped = name == "SIGTERM"
    code = LaunchError.exit_code
    return Failure(
        rank, "", message, hint, "", failure.timestamp, code, final=False, consequence=stopped
    )
