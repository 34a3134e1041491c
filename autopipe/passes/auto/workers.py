"""Speculative execution of strategies in other processes, if there are free CPU cores.

A worker is a fork of this process, so it has the model and all costs. It writes its results as
lines of JSON to a pipe and exits. (Processes of `concurrent.futures` would pickle their results.)
Results do not depend on each other, so they equal the results of sequential execution.
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

from autopipe.ir.cluster import usable_cpu_cores

Answer = dict[str, object]
"""A result that consists of lists, dicts and scalars."""
Work = Callable[[], Answer]
_CHUNK = 2**16


_WITH_THREADS = {"torch", "onnxruntime"}
"""Libraries with threads. These threads may hold locks that are never released in a fork of the
process.
"""


def free_cores() -> int:
    """Return the number of CPU cores that this process may use; 1 if it cannot fork."""
    if not hasattr(os, "fork") or _WITH_THREADS & sys.modules.keys():
        return 1
    return usable_cpu_cores()


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker process.

    keys: keys of the results that have not arrived, in order.
    number: process ID.
    pipe: file descriptor from which results are read.
    text: the part of the next result that has arrived.
    """

    keys: deque[str]
    number: int
    pipe: int
    text: bytes = b""

    def close(self, kill: bool) -> None:
        """Close the pipe and wait for the process to exit. With `kill`, kill it first."""
        os.close(self.pipe)
        if kill:
            os.kill(self.number, signal.SIGKILL)
        os.waitpid(self.number, 0)


@dataclass(slots=True, eq=False)
class SpeculativePool:
    """A context manager that runs up to `workers` worker processes at a time. Leaving the context
    kills all workers.

    With fewer than two workers, no work is started.
    """

    workers: int
    _waiting: deque[dict[str, Work]] = field(default_factory=deque)
    """Work for workers that have not started, by key."""
    _running: dict[int, _Worker] = field(default_factory=dict)
    """Workers by the file descriptor of their pipe."""
    _answers: dict[str, Answer | None] = field(default_factory=dict)
    """Results by key; None if the worker exited without this result."""

    def __enter__(self) -> SpeculativePool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.close(kill=True)
        self._running.clear()
        self._waiting.clear()

    def queue(self, works: dict[str, Work]) -> None:
        """Queue work for one worker, which runs the functions of `works` one after the other. The
        keys identify their results.
        """
        if self.workers > 1 and works:
            self._waiting.append(works)
            self._start_workers()

    def wait_for(self, key: str, seconds: float | None = None) -> Answer | None:
        """Wait for the result of the work with key `key`, remove it from the pool and return it.

        Return None if the work was not queued, if its worker failed, or if it is not finished after
        `seconds`.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while key not in self._answers and self.is_pending(key):
            left = None if end is None else max(0.0, end - time.monotonic())
            ready, _, _ = select.select(list(self._running), [], [], left)
            if not ready:
                return None
            for pipe in ready:
                self._read_results(pipe)
        return self._answers.pop(key, None)

    def is_pending(self, key: str) -> bool:
        """True if work with key `key` was queued and its result has not been returned yet."""
        running = (process.keys for process in self._running.values())
        return key in self._answers or any(key in keys for keys in (*self._waiting, *running))

    def _start_workers(self) -> None:
        """Start workers for queued work while fewer than `workers` are running."""
        while self._waiting and len(self._running) < self.workers:
            works = self._waiting.popleft()
            reading, writing = os.pipe()
            with warnings.catch_warnings():
                # Python 3.12 warns that a fork can deadlock if another thread holds a lock. The
                # warning is ignored: the only other thread prints progress, and the forked process
                # only writes to its pipe and exits, so it needs no lock of this thread.
                warnings.simplefilter("ignore", DeprecationWarning)
                number = os.fork()
            if not number:
                _run_worker(works, reading, writing)
            os.close(writing)
            self._running[reading] = _Worker(deque(works), number, reading)

    def _read_results(self, pipe: int) -> None:
        """Read results from the pipe of a worker. If the worker has exited, start the next one."""
        process = self._running[pipe]
        part = os.read(pipe, _CHUNK)
        *lines, process.text = (process.text + part).split(b"\n")
        for line in lines:
            self._answers[process.keys.popleft()] = json.loads(line)
        if not part:
            del self._running[pipe]
            self._answers |= dict.fromkeys(process.keys)
            process.close(kill=False)
            self._start_workers()


def _run_worker(works: dict[str, Work], reading: int, writing: int) -> None:
    """Run in a fork of this process: write the results of `works` to the pipe with file descriptor
    `writing`, and exit.

    The fork exits after any error, so that it never continues with the code of its parent.
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
