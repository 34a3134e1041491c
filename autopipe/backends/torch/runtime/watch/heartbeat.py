"""A rank's heartbeat: its task, since when, and that it lives, in a file that can be read after it
has died. The launcher on the same machine reads it (`backends/torch/elastic_agent.py`). A rank
states only that it waits for others; which rank hangs is for the launcher to find, which sees
several of them.
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

PULSES = "AUTOPIPE_PULSES"
"""Environment variable with the folder in which the launcher looks for the ranks' heartbeats."""
ENDED = "ended"  # The task of a rank that has nothing left to do.
_BEAT = struct.Struct("<d")
_STATE = struct.Struct("<d?ii")
_TASK = struct.Struct("<d?ii64p")
_NOBODY = (-1, -1)
_SIZE = _BEAT.size + _TASK.size


def phase_of(task: str) -> str:
    """The phase to which a task belongs: `start`, `step` or `checkpoint`."""
    return {
        "": "start",
        "start": "start",
        "compile": "start",
        "restore": "checkpoint",
        "checkpoint": "checkpoint",
    }.get(task, "step")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a rank may take in each phase, without getting further or giving a sign of
    life.
    """

    start_s: float = 1800.0
    step_s: float = 600.0  # One task of a step; the first one may compile kernels.
    checkpoint_s: float = 7200.0

    def of(self, task: str) -> float:
        return {"start": self.start_s, "step": self.step_s, "checkpoint": self.checkpoint_s}[
            phase_of(task)
        ]


DEFAULTS = Timeouts()


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """A record in the heartbeat file; times are those of the machine's monotonic clock, in
    seconds.
    """

    at: float
    since: float  # Since when the rank does what it does.
    waits: bool
    task: str
    peer: int = (
        -1
    )  # The rank whose message on `channel` it waits for; -1 where it is not one alone.
    channel: int = -1


class Heartbeat:
    """This rank's own record, kept in `file`, which is made, or for nobody."""

    def __init__(self, file: Path | None = None) -> None:
        self._record: bytearray | mmap.mmap = bytearray(_SIZE)
        self.on_task: Callable[[str], None] | None = None
        """Called with each task as it begins, where somebody wants to know."""
        self.task = "start"
        self.awaited = _NOBODY
        """The peer and channel that the rank waits for, or waited for when that ended in an error;
        -1 for none.
        """
        if (
            file is not None
        ):  # What is written to its bytes is in the file at once, even if the process never goes on.
            made = file.with_suffix(".new")
            made.write_bytes(self._record)
            with made.open("r+b") as opened:
                self._record = mmap.mmap(opened.fileno(), _SIZE)
            made.rename(file)

    @staticmethod
    def of(rank: int) -> Heartbeat:
        """The heartbeat of a rank where its launcher looks for it."""
        folder = os.environ.get(PULSES)
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
        self.sign_of_life()
        _TASK.pack_into(self._record, _BEAT.size, time.monotonic(), False, *_NOBODY, task.encode())

    def sign_of_life(self) -> None:
        _BEAT.pack_into(self._record, 0, time.monotonic())

    @contextmanager
    def waiting(self, peer: int = -1, channel: int = -1) -> Iterator[None]:
        """While the block runs, the rank waits for others: for the rank `peer`, where it is a
        message on `channel`.
        """
        self.awaited = peer, channel
        _STATE.pack_into(self._record, _BEAT.size, time.monotonic(), True, peer, channel)
        try:
            yield
        finally:
            _STATE.pack_into(self._record, _BEAT.size, time.monotonic(), False, *_NOBODY)
        self.awaited = _NOBODY

    @contextmanager
    def posting(self, peer: int, channel: int) -> Iterator[None]:
        """The block posts a message to or from the rank `peer`. If the block raises, `awaited`
        names that rank: torch may find only now that the connection is closed.
        """
        try:
            yield
        except RuntimeError:
            self.awaited = peer, channel
            raise


def heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:03d}.pulse"


def read_heartbeat(file: Path) -> HeartbeatRecord | None:
    """None where there is none yet."""
    try:
        record = file.read_bytes()
    except FileNotFoundError:
        return None
    if len(record) < _SIZE:
        return None
    since, waits, peer, channel, task = _TASK.unpack_from(record, _BEAT.size)
    return HeartbeatRecord(
        _BEAT.unpack_from(record)[0], since, waits, task.decode(errors="replace"), peer, channel
    )
