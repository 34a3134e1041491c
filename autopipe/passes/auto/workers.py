"""Speculative work in other processes, where there are cores for them.

A process is a copy of this one, which knows all that has been read and costed. It tells its answers
as lines of JSON through a pipe, and ends: `concurrent.futures` would pickle them. Answers do not
depend on one another, so that they are the same as if each were made in its turn.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from autopipe.ir.cluster import own_cores

Answer = dict[str, object]  # Lists, dicts and scalars.
Work = Callable[[], Answer]
_CHUNK = 2**16


_WITH_THREADS = {"torch", "onnxruntime"}
"""Libraries whose threads hold locks that nobody would release in a copy of the process."""


def free_cores() -> int:
    """Cores that this process may use; 1 where processes cannot be copied."""
    if not hasattr(os, "fork") or _WITH_THREADS & sys.modules.keys():
        return 1
    return own_cores()


@dataclass(slots=True, eq=False)
class _Process:
    keys: deque[str]  # Of the answers that are still to come, in order.
    number: int
    pipe: int
    text: bytes = b""  # Received part of the next answer.

    def close(self, kill: bool) -> None:
        os.close(self.pipe)
        if kill:
            os.kill(self.number, signal.SIGKILL)
        os.waitpid(self.number, 0)


@dataclass(slots=True, eq=False)
class SpeculativePool:
    """Work that is wanted soon, some of it begun. All processes are ended with the block that it is
    used in.
    """

    workers: int  # Processes at work at a time; with fewer than two nothing is begun.
    _waiting: deque[dict[str, Work]] = field(default_factory=deque)
    """Work of processes that are to come, by key."""
    _running: dict[int, _Process] = field(default_factory=dict)
    """By the pipe's end that answers are read from."""
    _answers: dict[str, Answer | None] = field(default_factory=dict)
    """By key; None where a process ended without one."""

    def __enter__(self) -> SpeculativePool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.close(kill=True)
        self._running.clear()
        self._waiting.clear()

    def expect(self, works: dict[str, Work]) -> None:
        """Have work done as soon as a process is free, one piece after the other; what was expected
        before comes first. Each piece goes with the key to ask for its answer by.
        """
        if self.workers > 1 and works:
            self._waiting.append(works)
            self._begin()

    def answer(self, key: str, seconds: float | None = None) -> Answer | None:
        """Result of the work expected as `key`, once it is done. None where none was begun, where
        its process failed, and where it takes longer than `seconds` from now.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while key not in self._answers and self.is_coming(key):
            left = None if end is None else max(0.0, end - time.monotonic())
            ready, _, _ = select.select(list(self._running), [], [], left)
            if not ready:
                return None
            for pipe in ready:
                self._read(pipe)
        return self._answers.pop(key, None)

    def is_coming(self, key: str) -> bool:
        """True if it is expected and nobody has asked for the answer yet."""
        running = (process.keys for process in self._running.values())
        return key in self._answers or any(key in keys for keys in (*self._waiting, *running))

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self.workers:
            works = self._waiting.popleft()
            reading, writing = os.pipe()
            with warnings.catch_warnings():
                # Python 3.12 warns of locks that other threads hold. The thread that prints
                # progress holds none that a copy of the process needs: the copy writes to its pipe
                # and ends.
                warnings.simplefilter("ignore", DeprecationWarning)
                number = os.fork()
            if not number:
                _tell(works, reading, writing)
            os.close(writing)
            self._running[reading] = _Process(deque(works), number, reading)

    def _read(self, pipe: int) -> None:
        process = self._running[pipe]
        part = os.read(pipe, _CHUNK)
        *lines, process.text = (process.text + part).split(b"\n")
        for line in lines:
            self._answers[process.keys.popleft()] = json.loads(line)
        if not part:
            del self._running[pipe]
            self._answers |= dict.fromkeys(process.keys)
            process.close(kill=False)
            self._begin()


def _tell(works: dict[str, Work], reading: int, writing: int) -> None:
    """Answer in the copy of this process and end it: whatever happens, it must not go on with what
    this one does.
    """
    try:
        os.close(reading)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with os.fdopen(writing, "wb") as file:
            for work in works.values():
                file.write(json.dumps(work()).encode() + b"\n")
                file.flush()
        os._exit(0)
    finally:
        os._exit(1)
