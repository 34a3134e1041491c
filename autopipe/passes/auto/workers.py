"""Work done ahead of its turn in other processes, where there are cores for them.

A process is a copy of this one, which knows all that has been read and costed. It tells its answers as lines of JSON
through a pipe, and ends: `concurrent.futures` would pickle them. Answers do not depend on one another, so that they are
the same as if each were made in its turn.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Answer = dict[str, object]
"""Lists, dicts and scalars."""
Work = Callable[[], Answer]

_CHUNK = 2**16


def free_cores() -> int:
    """Cores that this process may use; 1 where processes cannot be copied."""
    if not hasattr(os, "fork"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True, eq=False)
class SpeculativePool:
    """Work that is wanted soon, some of it begun. All processes are ended with the block that it is used in."""

    workers: int
    """Processes at work at a time; with fewer than two nothing is begun ahead."""
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
            process.end()
        self._running.clear()
        self._waiting.clear()

    def expect(self, works: dict[str, Work]) -> None:
        """Have work done as soon as a process is free, one piece after the other; what was expected before comes first.

        Each piece goes with the key to ask for its answer by.
        """
        if self.workers > 1 and works:
            self._waiting.append(works)
            self._begin()

    def answer(self, key: str, seconds: float | None = None) -> Answer | None:
        """Result of the work expected as `key`, once it is done.

        None where none was begun, where its process failed, and where it takes longer than `seconds` from now.
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
        if key in self._answers:
            return True
        return any(key in works for works in self._waiting) or any(
            key in process.keys for process in self._running.values()
        )

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self.workers:
            process = _Process.begin(self._waiting.popleft())
            self._running[process.pipe] = process

    def _read(self, end: int) -> None:
        process = self._running[end]
        part = os.read(end, _CHUNK)
        *lines, process.text = (process.text + part).split(b"\n")
        for line in lines:
            self._answers[process.keys.popleft()] = json.loads(line)
        if not part:
            del self._running[end]
            self._answers |= dict.fromkeys(process.keys)
            process.finish()
            self._begin()


@dataclass(slots=True, eq=False)
class _Process:
    keys: deque[str]
    """Of the answers that are still to come, in order."""
    number: int
    pipe: int
    text: bytes = b""
    """Received part of the next result."""

    @staticmethod
    def begin(works: dict[str, Work]) -> _Process:
        pipe, writing = os.pipe()
        number = os.fork()
        if number:
            os.close(writing)
            return _Process(deque(works), number, pipe)
        # The copy: whatever happens, it must not go on with what this process does.
        try:
            os.close(pipe)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with os.fdopen(writing, "wb") as file:
                for work in works.values():
                    file.write(json.dumps(work()).encode() + b"\n")
                    file.flush()
            os._exit(0)
        finally:
            os._exit(1)

    def finish(self) -> None:
        """It has said all that it had to say."""
        os.close(self.pipe)
        os.waitpid(self.number, 0)

    def end(self) -> None:
        """End it, whatever it has done."""
        os.close(self.pipe)
        os.kill(self.number, signal.SIGKILL)
        os.waitpid(self.number, 0)
