"""Heartbeat of a rank: its current task, since when, and the time of its last heartbeat, in a
memory-mapped file that the launcher on the same machine reads (`backends/torch/elastic_agent.py`),
even after the rank has died.

A rank records only that it waits for other ranks. The launcher compares several ranks to find the
one that hangs.
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
"""Environment variable with the launcher's folder of heartbeat files."""
ENDED_TASK = "ended"
"""The task of a rank that has completed its run."""
_BEAT_STRUCT = struct.Struct("<d")
_STATE_STRUCT = struct.Struct("<d?ii")
_TASK_STRUCT = struct.Struct("<d?ii64p")
_NO_PEER = (-1, -1)
_RECORD_BYTES = _BEAT_STRUCT.size + _TASK_STRUCT.size


def phase_of(task: str) -> str:
    """Return the phase of a task: `start`, `step` or `checkpoint`."""
    return {
        "": "start",
        "start": "start",
        "compile": "start",
        "restore": "checkpoint",
        "checkpoint": "checkpoint",
    }.get(task, "step")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Maximum seconds without progress, or without a heartbeat, in each phase."""

    start_s: float = 1800.0
    step_s: float = 600.0
    """Of one task of a step. The first task may compile kernels."""
    checkpoint_s: float = 7200.0

    def of(self, task: str) -> float:
        """Return the time-out of the phase of a task, in seconds."""
        return {"start": self.start_s, "step": self.step_s, "checkpoint": self.checkpoint_s}[
            phase_of(task)
        ]


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of a heartbeat file. Times are seconds of the machine's monotonic clock."""

    at: float
    since: float
    """When the rank began its task or its wait."""
    waits: bool
    task: str
    peer: int = -1
    """The rank from or to which it transfers a tensor on `channel`; -1 for other waits."""
    channel: int = -1


class Heartbeat:
    """This rank's heartbeat record, written to `file`, or only to memory if `file` is None."""

    def __init__(self, file: Path | None = None) -> None:
        self._record: bytearray | mmap.mmap = bytearray(_RECORD_BYTES)
        self.on_task: Callable[[str], None] | None = None
        """Called with each task that begins, if not None."""
        self.task = "start"
        self.awaited = _NO_PEER
        """(peer, channel) of the current wait, or of a wait that ended with an error; -1 for none.
        """
        # Writes to mapped memory reach the file even if the process is killed.
        if file is not None:
            made = file.with_suffix(".new")
            made.write_bytes(self._record)
            with made.open("r+b") as opened:
                self._record = mmap.mmap(opened.fileno(), _RECORD_BYTES)
            made.rename(file)

    @staticmethod
    def of(rank: int) -> Heartbeat:
        """Return the heartbeat of a rank in the file that its launcher reads; only in memory
        without a launcher.
        """
        folder = os.environ.get(HEARTBEAT_FOLDER_VARIABLE)
        return Heartbeat(None if folder is None else heartbeat_file(Path(folder), rank))

    @property
    def task(self) -> str:
        """Current task of the rank, such as `2F0` or `checkpoint`."""
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
        """Record that the process is alive, without a change of task."""
        _BEAT_STRUCT.pack_into(self._record, 0, time.monotonic())

    @contextmanager
    def waiting(self, peer: int = -1, channel: int = -1) -> Iterator[None]:
        """Record that the rank waits for others in the block: for rank `peer` on `channel`, if
        given.
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
    def posting(self, peer: int, channel: int) -> Iterator[None]:
        """If the block, which posts a transfer with rank `peer`, raises RuntimeError, make
        `awaited` name that rank: torch may notice a closed connection only then.
        """
        try:
            yield
        except RuntimeError:
            self.awaited = peer, channel
            raise


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat file."""
    return folder / f"rank_{rank:03d}.pulse"


def read_heartbeat(file: Path) -> HeartbeatRecord | None:
    """Return the record in a heartbeat file, None if the file does not exist yet."""
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
