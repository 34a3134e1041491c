"""The other end of a crew's processes: gives them programs to run and hears what came of it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autopipe.backends.torch.child import python_command
from autopipe.backends.torch.crew.line import JsonSocket
from autopipe.backends.torch.crew.member import Reply, Task
from autopipe.backends.torch.launcher import rank_environment, read_reports
from autopipe.ir.errors import LaunchError

_START_S = 300.0
"""Importing torch on a busy machine may take a minute."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Results of running one program on all ranks."""

    steps_s: tuple[float, ...]
    """Seconds of each step, the slowest rank's."""
    communication_bytes: int
    """Bytes moved by all ranks' exchanges in the last step."""
    peak_memory_bytes: int
    """Allocated at most on the rank that was recorded; 0 where none was."""
    processor_s: float
    """Processor time of a step, of all ranks together."""


@dataclass(slots=True)
class WorkerPool:
    """So many ranks on the CPU. A failure ends their processes; the next run starts new ones."""

    size: int
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    """The one that the ranks are copies of, and whose group they are."""
    _lines: list[JsonSocket] = field(default_factory=list, repr=False)
    _folder: str = field(default="", repr=False)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, program: Path, data: Path, steps: int, recorded: tuple[int, int], patience_s: float) -> ProgramRun:
        """Run a program's first steps on the samples in `data`.

        `recorded` are a rank, and of how many of the steps, from the first on, its allocations are counted: those take
        longer. Raises LaunchError where a rank fails or does not end within `patience_s`.
        """
        try:
            self._start()
            report = Path(self._folder) / "report.jsonl"
            report.unlink(missing_ok=True)
            task = Task(str(program), str(data), str(report), steps, recorded[1], recorded[0])
            for line in self._lines:
                line.send(asdict(task))
            replies = self._replies(patience_s)
        except BaseException:
            self.stop()
            raise
        reports = read_reports(report)
        moved = reports[-1]["communication_bytes"]
        assert isinstance(moved, dict)
        seconds = tuple(float(str(each["step_time_s"])) for each in reports)
        return ProgramRun(
            steps_s=seconds,
            communication_bytes=sum(moved.values()),
            peak_memory_bytes=max(each.peak_memory_bytes for each in replies),
            processor_s=sum(each.processor_s for each in replies),
        )

    def stop(self) -> None:
        """End the processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for line in self._lines:
            line.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process, self._lines, self._folder = None, [], ""

    def _start(self) -> None:
        if self._process is not None:
            return
        self._folder = tempfile.mkdtemp(prefix="autopipe-crew-")
        pairs = [socket.socketpair() for _ in range(self.size)]
        self._lines = [JsonSocket(ours) for ours, _ in pairs]
        theirs = [end.fileno() for _, end in pairs]
        words = python_command("autopipe.backends.torch.crew.fork", f"{self._folder}/store", *map(str, theirs))
        with rank_environment():
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, pass_fds=theirs, start_new_session=True, env=dict(os.environ)
            )
        for _, end in pairs:
            end.close()
        self._replies(_START_S)

    def _replies(self, patience_s: float) -> list[Reply]:
        """One of each rank, in the order in which they came. Raises LaunchError with the first that failed."""
        end = time.monotonic() + patience_s
        found: list[Reply] = []
        waiting = dict(enumerate(self._lines))
        while waiting:
            ready, _, _ = select.select(list(waiting.values()), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise LaunchError(f"ranks {sorted(waiting)} of {self.size} did not end within {patience_s:g} s")
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                try:
                    reply = Reply(**waiting.pop(rank).receive())
                except (EOFError, OSError):
                    raise LaunchError(f"the process of rank {rank} died") from None
                if reply.error:
                    raise LaunchError(reply.error.strip().splitlines()[-1], where=f"rank {rank}")
                found.append(reply)
        return found
