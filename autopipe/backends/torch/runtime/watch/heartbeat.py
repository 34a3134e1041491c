"""Heartbeat of a rank: its current task, the time at which the task began, and the time of the last
sign of life. They are in a memory-mapped file that the launcher on the same machine reads
(`backends/torch/elastic_agent.py`), even after the rank has died.

A rank records only that it waits for other ranks. To find the rank that hangs, the launcher
compares the heartbeats of several ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_FOLDER_VARIABLE = "AUTOPIPE_PULSES"
"""Name of the environment variable that states the folder of heartbeat files. The launcher
sets it.
"""
ENDED_TASK = "ended"
"""Name of the task of a rank that has completed its run."""
_BEAT_STRUCT = struct.Struct("<d")
_STATE_STRUCT = struct.Struct("<d?ii")
_TASK_STRUCT = struct.Struct("<d?ii64p")
_NO_PEER = (-1, -1)
_RECORD_BYTES = _BEAT_STRUCT.size + _TASK_STRUCT.size


def phase_of(task: str) -> str:
    """Return the phase to which a task belongs: `start`, `step` or `checkpoint`."""
    return {
        "": "start",
        "start": "start",
        "compile": "start",
        "restore": "checkpoint",
        "checkpoint": "checkpoint",
    }.get(task, "step")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """For each phase, the maximum seconds that a rank may spend in one task, or without a
    heartbeat, before the launcher considers it hanging.
    """

    start_s: float = 1800.0
    step_s: float = 600.0
    """For one task of a step. The first task may include the compilation of kernels."""
    checkpoint_s: float = 7200.0

    def seconds_for_task(self, task: str) -> float:
        """Return the time-out for a task, in seconds."""
        return {"start": self.start_s, "step": self.step_s, "checkpoint": self.checkpoint_s}[
            phase_of(task)
        ]


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of a heartbeat file. Times are seconds of the machine's monotonic clock: `at` is
    the time of the last heartbeat. `waits` is True while the rank waits for other ranks.
    """

    at: float
    since: float
    """Time at which the rank began its task or its wait."""
    waits: bool
    task: str
    peer: int = -1
    """Rank with which the rank exchanges a tensor on `channel`, and for which it waits; -1 for
    other waits and without a wait.
    """
    channel: int = -1


class Heartbeat:
    """Writes this rank's heartbeat to a file, or only to memory if `file` is None."""

    def __init__(self, file: Path | None = None) -> None:
        self._record: bytearray | mmap.mmap = bytearray(_RECORD_BYTES)
        self.on_task: Callable[[str], None] | None = None
        """Function that is called with the name of each task that begins; None for none."""
        self.task = "start"
        self.awaited = _NO_PEER
        """(rank, channel) of the current wait, or of a wait that ended with an error; -1 for
        none.
        """
        # The file is memory-mapped, because writes to mapped memory reach the file even if the
        # process is killed. It is renamed when it is complete, so that a reader never finds an
        # empty file.
        if file is not None:
            made = file.with_suffix(".new")
            made.write_bytes(self._record)
            with made.open("r+b") as opened:
                self._record = mmap.mmap(opened.fileno(), _RECORD_BYTES)
            made.rename(file)

    @staticmethod
    def open_for_rank(rank: int) -> Heartbeat:
        """Return a heartbeat in the file that the launcher reads for rank `rank`; in memory only if
        no launcher runs.
        """
        folder = os.environ.get(HEARTBEAT_FOLDER_VARIABLE)
        return Heartbeat(None if folder is None else heartbeat_file(Path(folder), rank))

    @property
    def task(self) -> str:
        """Current task of the rank, for example `2F0` (forward of micro-batch 0 on stage 2) or
        `checkpoint`.
        """
        return self._task

    @task.setter
    def task(self, task: str) -> None:
        self._task = task
        if self.on_task is not None:
            self.on_task(task)
        self.record_alive()
        _TASK_STRUCT.pack_into(
            self._record, _BEAT_STRUCT.size, time.monotonic(), False, *_NO_PEER, task.encode()
        )

    def record_alive(self) -> None:
        """Record a heartbeat: the process is alive. The task does not change."""
        _BEAT_STRUCT.pack_into(self._record, 0, time.monotonic())

    @contextmanager
    def record_wait(self, peer: int = -1, channel: int = -1) -> Iterator[None]:
        """Record that the rank waits for other ranks while the block runs: for a tensor of rank
        `peer` on `channel`, if given.
        """
        self.awaited = peer, channel
        _STATE_STRUCT.pack_into(
            self._record, _BEAT_STRUCT.size, time.monotonic(), True, peer, channel
        )
        try:
            yield
        finally:
            _STATE_STRUCT.pack_into(
                self._record, _BEAT_STRUCT.size, time.monotonic(), False, *_NO_PEER
            )
        self.awaited = _NO_PEER

    @contextmanager
    def record_peer_on_error(self, peer: int, channel: int) -> Iterator[None]:
        """Use this around a block that starts a transfer with rank `peer`. If the block raises
        RuntimeError, set `awaited` to (peer, channel), because torch may notice a closed connection
        only while it starts a transfer.
        """
        try:
            yield
        except RuntimeError:
            self.awaited = peer, channel
            raise


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat file in `folder`."""
    return folder / f"rank_{rank:03d}.pulse"


def read_heartbeat(file: Path) -> HeartbeatRecord | None:
    """Return the contents of a heartbeat file; None if the file does not exist or is not complete
    yet.
    """
    try:
        record = file.read_bytes()
    except FileNotFoundError:
        return None
    if len(record) < _RECORD_BYTES:
        return None
    since, waits, peer, channel, task = _TASK_STRUCT.unpack_from(record, _BEAT_STRUCT.size)
    return HeartbeatRecord(
        _BEAT_STRUCT.unpack_from(record)[0],
        since,
        waits,
        task.decode(errors="replace"),
        peer,
        channel,
    )
