"""Torch elastic's agent, told which failures are worth another try and which rank hangs.

Elastic's own launcher starts ranks again whatever they ended with; this agent stops at what would
only fail again, such as a data file that is missing. By the ranks' heartbeats, one that waits for
others is not to blame, however long it waits. One is that does not progress in a task of its own
(an endless loop), gives no sign of life at all (stopped, or stuck while it holds Python's lock), or
never began. Where all wait for one another, it is the one that waits longest.
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

from autopipe.backends.torch.child import PARENT, environment, python_command
from autopipe.backends.torch.fork_server import ForkedProcess, ForkServer
from autopipe.backends.torch.rendezvous import Handler, Place
from autopipe.backends.torch.runtime.communication.signed_store import KEY
from autopipe.backends.torch.runtime.communication.transport import ATTEMPT
from autopipe.backends.torch.runtime.job import NETWORK_VARIABLES, interface_variables
from autopipe.backends.torch.runtime.watch.failures import STACKS, STOP, Failure, read_failure
from autopipe.backends.torch.runtime.watch.heartbeat import (
    ENDED,
    PULSES,
    HeartbeatRecord,
    Timeouts,
    heartbeat_file,
    phase_of,
    read_heartbeat,
)
from autopipe.backends.torch.torch_interfaces import starting_processes_by
from autopipe.ir.errors import LaunchError
from autopipe.ir.words import plural

_LOOKS_S = 0.25
_ABSENCE_S = 5.0
"""A watcher that has not looked for so long was stopped itself, and the ranks perhaps with it."""


def _spelled(task: str) -> str:
    return f"task {task}" if task[:1].isdigit() else f"its {task or 'start'}"


def waits_of(records: Mapping[int, HeartbeatRecord], rank: int) -> str:
    """For whom a rank waits, for whom that one does, and so on to one that comes again, waits for
    several, or is on another node. Empty where the first waits for no rank alone.
    """
    parts: list[str] = []
    seen: set[int] = set()
    while rank in records and rank not in seen and (record := records[rank]).peer >= 0:
        seen.add(rank)
        peer = records.get(record.peer)
        state = ", of another node" if peer is None else f", which waits in {_spelled(peer.task)}"
        parts.append(f"for rank {record.peer} (channel {record.channel}){state}")
        rank = record.peer
    if parts and rank in records and rank not in seen:
        parts.append("for its group")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class HungRank:
    rank: int
    task: str
    """Empty where the rank has not even begun."""
    seconds: float
    waits: bool = False
    """For others, as they all do."""
    chain: str = ""
    """For whom it waits, and for whom that one does."""
    host: str = ""
    """This machine, where there are several."""

    def message(self) -> str:
        name = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.waits:
            chain = f": {self.chain}" if self.chain else ""
            return (
                f"{name} waits in {_spelled(self.task)} for {self.seconds:.0f} s, and so do all "
                f"others{chain}"
            )
        return f"{name} hangs in {_spelled(self.task)} for {self.seconds:.0f} s"

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
    """The rank that hangs, of those that began at `began`, by rank; of several the one that has
    done so longest. Where other nodes have ranks too, all of this one's may wait twice as long, for
    theirs to be found there.
    """
    running = {
        rank: record for rank, record in records.items() if record is None or record.task != ENDED
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
        found = [replace(hang, chain=waits_of(known, hang.rank)) for hang in waiting]
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
        if now - self._looked < _LOOKS_S:
            return None
        if now - self._looked > _ABSENCE_S:
            self._began = now
        self._looked = now
        records: dict[int, HeartbeatRecord | None] = {}
        for rank in self.ranks:
            record = read_heartbeat(heartbeat_file(self.folder, rank))
            if (
                record is not None
            ):  # Nothing in it counts as older than the time since watching began.
                record = replace(
                    record, at=max(record.at, self._began), since=max(record.since, self._began)
                )
            records[rank] = record
        hang = find_hung_rank(records, self._began, now, self.timeouts, self.nodes)
        return hang and replace(hang, host=socket.gethostname() if self.nodes > 1 else "")


_POLL_S = 0.1
_LAST_WORDS_S = 0.5
"""For a rank that hangs to write what its threads are doing."""


_NETWORK = "AUTOPIPE_NETWORK"


def network_of_ranks(first: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Variables of the network for the ranks of a node: those set on the first node, but for those
    set on it.
    """
    return {
        name: str(first[name]) for name in NETWORK_VARIABLES if name in first and name not in own
    }


class Agent(LocalElasticAgent):
    """Runs this node's ranks, again after a failure that may not come back."""

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
        """`network`: variables of the network that this node's user has set. `stop_s`: how long
        ranks that are asked to stop may take to save.
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
        """The one that ended the latest attempt."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Torch 2.13 keeps one store for all attempts, and gloo would find in it where the ranks of
        # the last one listened. Nodes may differ in how often they have restarted, so a token tells
        # attempts apart.
        store: Any = worker_group.store
        if worker_group.group_rank == 0:
            store.set(ATTEMPT, uuid.uuid4().hex)
            store.set(_NETWORK, json.dumps(dict(self._network)))
        os.environ[ATTEMPT] = store.get(ATTEMPT).decode()
        os.environ |= network_of_ranks(json.loads(store.get(_NETWORK)), self._network)
        self._hang = None
        if self._timeouts is None:
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]
        folder = Path(tempfile.mkdtemp(prefix="heartbeats_", dir=self._logs))
        with environment({PULSES: str(folder)}):
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
        that save end with a last checkpoint. A second Ctrl-C ends the ranks at once.

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
                    os.kill(pid, STOP)
            stop_s = self._stop_s
            self._stop_s = 0.0
            self._pcontext.wait(timeout=stop_s, period=_POLL_S)
        super()._shutdown(death_sig, *further, **options)

    def _end(self, worker_group: WorkerGroup, rank: int) -> None:
        """End a rank that hangs; elastic then ends the others. It may be deaf to all but
        SIGKILL.
        """
        pid = next(worker.id for worker in worker_group.workers if worker.global_rank == rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS)
            time.sleep(_LAST_WORDS_S)
            os.killpg(pid, signal.SIGKILL)


def run_agent(
    command: tuple[str, ...],
    ranks: int,
    place: Place,
    max_restarts: int,
    timeouts: Timeouts | None,
    logs: Path,
    live: bool,
    note: Callable[[str], None],
    poll: Callable[[], None] = lambda: None,
    stop_s: float = 0.0,
    server: ForkServer | None = None,
) -> Failure | None:
    """Meet the other nodes, run `ranks` processes of `command`, as `python_command` takes it, to
    their end.

    `poll` is called at each look at them. Returns the failure that ended them, None where all went
    well. With `timeouts` a rank that hangs has failed, too. `server` forks the ranks; without it,
    each is a new interpreter. What they write goes to files in `logs`, but for rank 0's stdout with
    `live`. Raises torch's SignalException and RendezvousError.
    """
    handler = Handler(place, ranks)
    entry, *words = python_command(*command)
    spec = WorkerSpec(
        role="rank", local_world_size=ranks, entrypoint=entry, args=tuple(words), rdzv_handler=handler,
        max_restarts=max_restarts, monitor_interval=_POLL_S,
    )  # fmt: skip
    redirects = dict.fromkeys(range(ranks), Std.ALL) | ({0: Std.ERR} if live else {})
    network = {name: os.environ[name] for name in NETWORK_VARIABLES if os.environ.get(name)}
    starter = server or ForkServer()  # One that has not been entered starts interpreters.

    def start(
        command: tuple[str, ...],
        variables: dict[str, str],
        output: IO[str] | None,
        errors: IO[str] | None,
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        return starter.start(
            list(command[len(python_command()) :]), variables, (None, output, errors)
        )

    agent = Agent(spec, logs, redirects, timeouts, note, poll, network, stop_s)
    try:
        with environment(_ranks_environment(handler, place)), starting_processes_by(start):
            result = agent.run()
    except SignalException:
        # Without closing the rendezvous: other nodes may go on with one that takes this one's
        # place.
        raise
    except RendezvousError:  # No other attempt: the ranks' failure says more.
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


def _ranks_environment(handler: Handler, place: Place) -> dict[str, str]:
    """Environment of the ranks. They listen on the interface of this node's address, or, where
    there are several nodes, on those that a user names.
    """
    found = {
        PARENT: str(os.getpid()),
        KEY: handler.signer.key.hex(),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
    }
    return found | interface_variables(
        {} if place.nodes == 1 else os.environ, lambda: handler.address
    )


def first_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> Failure:
    """The failure, among those by rank, that came first and not because of another one."""
    found = [_failure(rank, failure, logs) for rank, failure in failures.items()]
    return min(found, key=lambda failure: (failure.consequence, failure.time))


def _failure(rank: int, failure: ProcessFailure, logs: Path) -> Failure:
    written = read_failure(failure.error_file_data)
    if written is not None:
        return written
    name = failure.signal_name() if failure.exitcode < 0 else ""
    message = f"killed by {name}"
    hint = "the machine may be out of memory" if name == "SIGKILL" else ""
    if not name:  # It failed before it could say more than the last line that it wrote.
        files = sorted(
            logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"),
            key=lambda path: path.stat().st_mtime,
        )
        lines = files[-1].read_text(encoding="utf-8", errors="replace").split("\n") if files else []
        message = next(
            (line for line in reversed(lines) if line.strip()),
            f"ended with exit code {failure.exitcode}",
        )
    stopped = name == "SIGTERM"  # As elastic stops the ranks that are left.
    code = LaunchError.exit_code
    return Failure(
        rank, "", message, hint, "", failure.timestamp, code, final=False, consequence=stopped
    )
