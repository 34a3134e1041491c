"""torch elastic's agent, extended by two decisions: whether a failure is retried, and which rank
hangs.

Elastic restarts the ranks after every failure. This agent does not restart them after a final
failure, for example a missing data file, because the next attempt would fail again.

Each rank writes heartbeats. A rank hangs if it makes no progress in a task that waits for no other
rank (an endless loop), if its heartbeats end (the process is stopped, or stuck while it holds
Python's global lock), or if it never starts. A rank that waits for another rank is not reported
while some rank does not wait. If all ranks wait for one another, the rank that has waited longest
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

from autopipe.backends.torch.child import PARENT_VARIABLE, changed_environment, python_command
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
from autopipe.backends.torch.torch_interfaces import starting_processes_by
from autopipe.ir.errors import LaunchError
from autopipe.ir.words import plural

_LOOK_INTERVAL_S = 0.25
_SUSPENSION_S = 5.0
"""Seconds. If two calls of `Watchdog.look` are further apart than this, the launcher itself was
suspended, and the ranks perhaps with it. The timeouts then start again.
"""


def _task_text(task: str) -> str:
    return f"task {task}" if task[:1].isdigit() else f"its {task or 'start'}"


def wait_chain_text(records: Mapping[int, HeartbeatRecord], rank: int) -> str:
    """Return the chain of ranks that a rank waits for, as text. Each rank of the chain waits for
    the next one.

    The chain ends at a rank that occurs in it already, that waits for its process group, or that
    runs on another node. Return "" if `rank` does not wait for one particular rank.
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
    rank: int
    task: str
    """Empty if the rank has not started."""
    seconds: float
    waits: bool = False
    """True if the rank waits for other ranks, as all ranks of this node do."""
    chain: str = ""
    """Text of `wait_chain_text`: the rank that this one waits for, the rank that that one waits
    for, and so on.
    """
    host: str = ""
    """Name of this machine; empty if the launch has one node."""

    def message(self) -> str:
        name = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.waits:
            chain = f": {self.chain}" if self.chain else ""
            return (
                f"{name} waits in {_task_text(self.task)} for {self.seconds:.0f} s, and so do all "
                f"others{chain}"
            )
        return f"{name} hangs in {_task_text(self.task)} for {self.seconds:.0f} s"

    def failure(self, logs: Path) -> Failure:
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
    """Return the rank that hangs, or None. If several hang, return the one that has hung longest.

    `records` has the latest heartbeat of each rank of this node, or None for a rank that has not
    written one. `began` is the time at which the ranks started. If all ranks of this node wait,
    each may wait for its timeout on a single node, and for twice its timeout if there are other
    nodes, because the rank to blame may run on another node and be found there.
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
            limit = timeouts.of(record.task)
        if hang.seconds > limit:
            found.append(hang)
    patience = 1 if nodes == 1 else 2
    waiting = [
        HungRank(rank, record.task, now - record.since, waits=True)
        for rank, record in running.items()
        if record is not None
        and record.waits
        and now - record.since > patience * timeouts.of(record.task)
    ]
    if not found and len(waiting) == len(running):
        known = {rank: record for rank, record in running.items() if record is not None}
        found = [replace(hang, chain=wait_chain_text(known, hang.rank)) for hang in waiting]
    return max(found, key=lambda hang: hang.seconds, default=None)


@dataclass(slots=True)
class Watchdog:
    folder: Path
    ranks: tuple[int, ...]
    timeouts: Timeouts
    nodes: int
    _began: float = field(default_factory=time.monotonic)
    _looked: float = field(default_factory=time.monotonic)

    def look(self) -> HungRank | None:
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
                # The times of a heartbeat are not before the time at which watching began.
                record = replace(
                    record, at=max(record.at, self._began), since=max(record.since, self._began)
                )
            records[rank] = record
        hang = find_hung_rank(records, self._began, now, self.timeouts, self.nodes)
        return hang and replace(hang, host=socket.gethostname() if self.nodes > 1 else "")


_POLL_S = 0.1
_STACK_DUMP_S = 0.5
"""Seconds that a hanging rank gets to write the stacks of its threads before it is killed."""


_NETWORK_KEY = "AUTOPIPE_NETWORK"


def network_of_ranks(first: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the network variables that the ranks of a node take over from the first node: those in
    `first` that are not set in `own`.
    """
    return {
        name: str(first[name]) for name in NETWORK_VARIABLES if name in first and name not in own
    }


class RankAgent(LocalElasticAgent):
    """An elastic agent that runs the ranks of this node, and restarts them after a failure that is
    not final.
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
        """`network`: the network variables that the user of this node has set. `stop_s`: seconds
        that ranks have to save a checkpoint after a request to stop; 0 if they save none.
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
        # Torch 2.13 uses one store for all attempts. Gloo would find in it the addresses at which
        # the ranks of the previous attempt listened. The number of restarts can differ between
        # nodes, so a random token identifies the attempt.
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
        with changed_environment({HEARTBEAT_FOLDER_VARIABLE: str(folder)}):
            started: dict[int, Any] = super()._start_workers(worker_group)
        ranks = tuple(worker.global_rank for worker in worker_group.workers)
        self._watch = Watchdog(folder, ranks, self._timeouts, worker_group.group_world_size or 1)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._poll()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and self._hang is None and self._watch is not None:
            self._hang = self._watch.look()
            if self._hang is not None:
                self._end(worker_group, self._hang.rank)
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

    def _end(self, worker_group: WorkerGroup, rank: int) -> None:
        """Let a hanging rank write its stacks, then kill its process group. Elastic then ends the
        other ranks. The signal is SIGKILL because a hanging process may ignore all other signals.
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
    """Join the rendezvous with the other nodes and run `ranks` processes of `command` until they
    end.

    `command` has the form that `python_command` takes. The agent calls `poll` each time that it
    looks at the ranks. With `timeouts`, a rank that hangs counts as failed. A `server` that has
    been entered forks the ranks; otherwise each rank is a new interpreter. The output of the ranks
    goes to files in `logs`, except for the stdout of the first rank of the node if `live` is set.

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
    starter = server or ForkServer()  # A server that has not been entered starts interpreters.

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
        with changed_environment(_ranks_environment(handler, place)), starting_processes_by(start):
            result = agent.run()
    except SignalException:
        # The rendezvous stays open: the other nodes may continue with a node that replaces this
        # one.
        raise
    # There is no other attempt. The failure of a rank, if there is one, says more.
    except RendezvousError:
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
    """Return the environment variables of the ranks. On a single node, the ranks listen on the
    interface of this node's address. With several nodes, they listen on the interfaces that the
    user's environment names, if it names any.
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
    """Return the earliest failure that is no consequence of another failure. If all of them are
    consequences, return the earliest.
    """
    found = [_failure_of_process(rank, failure, logs) for rank, failure in failures.items()]
    return min(found, key=lambda failure: (failure.consequence, failure.time))


def _failure_of_process(rank: int, failure: ProcessFailure, logs: Path) -> Failure:
    written = read_failure(failure.error_file_data)
    if written is not None:
        return written
    name = failure.signal_name() if failure.exitcode < 0 else ""
    message = f"killed by {name}"
    hint = "the machine may be out of memory" if name == "SIGKILL" else ""
    # The process ended without a report of its failure. The last line of its stderr is the best
    # message available.
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
    stopped = name == "SIGTERM"  # Elastic stops the remaining ranks with SIGTERM.
    code = LaunchError.exit_code
    return Failure(
        rank, "", message, hint, "", failure.timestamp, code, final=False, consequence=stopped
    )
