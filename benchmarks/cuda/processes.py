"""Processes of a benchmark, each with a time limit after which it ends with all processes that it
started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cuda.fork_server import Forked, ForkServer, ServerLost

ROOT = Path(__file__).parents[2]
"""The folder that holds `autopipe` and `benchmarks`."""
_TOLD = 2
"""Last lines of a failed process that its error shows."""


Process = subprocess.Popen[bytes] | Forked


class Failed(Exception):
    """A process failed or exceeded its time limit; the message has its last lines."""


@dataclass(slots=True)
class Processes:
    """The running processes of a benchmark. All methods may be called from several threads."""

    server: ForkServer | None = None
    """Starts the commands that may be forked; None: each is a process of its own."""
    _running: set[int] = field(default_factory=set)
    _ports: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def free_port(self) -> int:
        """Return a port of this machine that nobody listens on and that no other caller was
        given.
        """
        with self._lock:
            while True:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = int(probe.getsockname()[1])
                if port not in self._ports:
                    self._ports.add(port)
                    return port

    def run_together(self, commands: Sequence[Command], end: float) -> list[str]:
        """Run the commands at the same time and return what each prints.

        `end` is the moment of `time.monotonic` at which they are killed. Raises Failed as soon as
        one fails or the time is over, after the others are killed.
        """
        started: list[_Running] = []
        with tempfile.TemporaryDirectory(prefix="autopipe-cuda-") as folder:
            try:
                started += [
                    self._start(each, Path(folder) / str(index))
                    for index, each in enumerate(commands)
                ]
                self._wait(started, end)
                return [each.printed() for each in started]
            finally:
                for each in started:
                    self._kill(each.process)

    def close(self) -> None:
        """Kill all running processes, and start none from now on."""
        with self._lock:
            self._closed = True
            running = tuple(self._running)
        for pid in running:
            kill_tree(pid)
        if self.server is not None:
            self.server.close()

    def _start(self, command: Command, outputs: Path) -> _Running:
        outputs.mkdir()
        if self._closed:
            raise Failed("the run has ended")
        # Files, not pipes: what a killed process leaves running may keep a pipe open, and its
        # reader waiting.
        with (outputs / "out").open("wb") as out, (outputs / "err").open("wb") as err:
            process = self._fork(command, outputs) or subprocess.Popen(
                command.words,
                cwd=ROOT,
                env=os.environ | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        with self._lock:
            self._running.add(process.pid)
            closed = self._closed
        if closed:  # Meanwhile, and `close` did not know this process.
            kill_tree(process.pid)
        return _Running(process, outputs, command.checked)

    def _fork(self, command: Command, outputs: Path) -> Forked | None:
        """Start the command in the fork server; None if there is none, or if the command is not for
        it.
        """
        if self.server is None or not command.forked:
            return None
        try:
            words = command.words[1:]
            return self.server.run(
                words, command.environment, ROOT, outputs / "out", outputs / "err"
            )
        except ServerLost:
            self.server = None
            return None

    def _wait(self, started: Sequence[_Running], end: float) -> None:
        """Return when all processes have ended well. Raises Failed otherwise."""
        while True:
            codes = [each.process.poll() for each in started]
            failed = [
                each for each, code in zip(started, codes, strict=True) if code and each.checked
            ]
            if failed:
                raise Failed(" | ".join(failed[0].last_lines()))
            if None not in codes:
                return
            if time.monotonic() >= end:
                late = next(each for each, code in zip(started, codes, strict=True) if code is None)
                raise Failed(" | ".join(["the time limit is over", *late.last_lines()]))
            time.sleep(_LOOK_S)

    def _kill(self, process: Process) -> None:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()
        with self._lock:
            self._running.discard(process.pid)


_LOOK_S = 0.05
"""Seconds between two looks at running processes."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and its changes to the environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    checked: bool = True
    """False if an exit code other than 0 is no failure."""
    forked: bool = False
    """True if the fork server may start it."""


@dataclass(frozen=True, slots=True)
class _Running:
    process: Process
    outputs: Path
    checked: bool

    def printed(self) -> str:
        return (self.outputs / "out").read_text(encoding="utf-8", errors="replace")

    def last_lines(self) -> list[str]:
        """Return the last lines that the process wrote to stderr, or else to stdout."""
        texts = (
            (self.outputs / name).read_text(encoding="utf-8", errors="replace").strip()
            for name in ("err", "out")
        )
        text = next(filter(None, texts), f"exit code {self.process.poll()} and no output")
        return text.splitlines()[-_TOLD:]


def python(*words: object, **environment: object) -> Command:
    """Return the command of Python that runs `words` with this tree's modules, and no plan from a
    cache.
    """
    given = {name: str(value) for name, value in environment.items()}
    return Command((sys.executable, *map(str, words)), environment_of_python() | given)


def environment_of_python() -> dict[str, str]:
    """Return the changes to the environment with which Python finds this tree's modules, and no
    plan from a cache.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "AUTOPIPE_CACHE": os.devnull}


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, in whatever session or process group they are."""
    for each in (pid, *descendants(pid)):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the numbers of the processes that `pid` and its descendants started and that still
    run.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):  # It has ended meanwhile.
                # The name of the program, in parentheses, may contain blanks.
                fields = (
                    (entry / "stat")
                    .read_text(encoding="utf-8", errors="replace")
                    .rpartition(")")[2]
                    .split()
                )
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


@dataclass(frozen=True, slots=True)
class Runner:
    """Starts the processes of one row, which end with the row's time."""

    processes: Processes
    end: float
    """Moment of `time.monotonic`."""

    def run(self, *words: object, **environment: object) -> str:
        """Return what Python prints for `words`. Raises Failed."""
        return self.together(python(*words, **environment))[0]

    def together(self, *commands: Command) -> list[str]:
        """Run several commands at the same time and return what each prints. Raises Failed."""
        return self.processes.run_together(commands, self.end)

    def run_forked(self, *words: object, **environment: object) -> str:
        """Return what Python prints for `words`, in a fork of a process that has imported torch if
        there is one. Raises Failed.
        """
        return self.together(replace(python(*words, **environment), forked=True))[0]

    def last_object(self, *words: object, **environment: object) -> Any:
        """Return the JSON object in the last line that Python prints for `words`. Raises Failed."""
        return _last_object(self.run(*words, **environment))

    def last_object_forked(self, *words: object, **environment: object) -> Any:
        """As `last_object`, by `run_forked`."""
        return _last_object(self.run_forked(*words, **environment))

    def autopipe(self, *words: object, **environment: object) -> Any:
        """Return the JSON object that a command of autopipe prints last. Raises Failed."""
        return self.last_object("-m", "autopipe", *words, "--json", **environment)


def _last_object(printed: str) -> Any:
    lines = printed.splitlines()
    if not lines:
        raise Failed("no output")
    return json.loads(lines[-1])
