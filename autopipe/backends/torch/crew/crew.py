"""The other end of a crew's processes: gives them programs to run and hears what came of it."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from autopipe.backends.torch.crew.member import Reply, Task, serve
from autopipe.backends.torch.launcher import rank_environment, read_reports
from autopipe.ir.errors import LaunchError

_START_S = 300.0
"""Importing torch on a busy machine may take a minute."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What ranks did."""

    steps_s: tuple[float, ...]
    """Seconds of each step, the slowest rank's."""
    communication_bytes: int
    """What all ranks' exchanges moved in the last step."""
    peak_memory_bytes: int
    """Allocated at most on the rank that was recorded; 0 where none was."""
    processor_s: float
    """Processor time of a step, of all ranks together."""


@dataclass(slots=True)
class Crew:
    """So many ranks on the CPU. A failure ends their processes; the next run starts new ones."""

    size: int
    _processes: list[ForkServerProcess] = field(default_factory=list, repr=False)
    _connections: list[Connection] = field(default_factory=list, repr=False)
    _folder: str = field(default="", repr=False)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, program: Path, data: Path, steps: int, recorded: tuple[int, int], patience_s: float) -> Observed:
        """Run a program's first steps on the samples in `data`.

        `recorded` are a rank, and of how many of the steps, from the first on, its allocations are counted: those take
        longer. Raises LaunchError where a rank fails or does not end within `patience_s`.
        """
        try:
            self._start()
            report = Path(self._folder) / "report.jsonl"
            report.unlink(missing_ok=True)
            task = Task(str(program), str(data), str(report), steps, recorded[1], recorded[0])
            for connection in self._connections:
                connection.send(task)
            replies = self._replies(patience_s)
        except BaseException:
            self.stop()
            raise
        reports = read_reports(report)
        moved = reports[-1]["communication_bytes"]
        assert isinstance(moved, dict)
        seconds = tuple(float(str(each["step_time_s"])) for each in reports)
        return Observed(
            steps_s=seconds,
            communication_bytes=sum(moved.values()),
            peak_memory_bytes=max(each.peak_memory_bytes for each in replies),
            processor_s=sum(each.processor_s for each in replies),
        )

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._folder = [], [], ""

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        # Imported once by the server; its children find them there. Optimizers import torch._dynamo: a second each.
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", "autopipe.backends.torch.runtime"]
        )
        self._folder = tempfile.mkdtemp(prefix="autopipe-crew-")
        with rank_environment():
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                store = f"{self._folder}/store"
                process = context.Process(target=serve, args=(rank, self.size, store, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        self._replies(_START_S)

    def _replies(self, patience_s: float) -> list[Reply]:
        """One of each rank, in the order in which they came. Raises LaunchError with the first that failed."""
        end = time.monotonic() + patience_s
        found: list[Reply] = []
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, end - time.monotonic()))
            if not ready:
                raise LaunchError(f"ranks {sorted(waiting)} of {self.size} did not end within {patience_s:g} s")
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    reply = waiting.pop(rank).recv()
                except EOFError:
                    raise LaunchError(f"the process of rank {rank} died") from None
                if reply.error:
                    raise LaunchError(reply.error.strip().splitlines()[-1], where=f"rank {rank}")
                found.append(reply)
        return found
