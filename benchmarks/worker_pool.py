"""Ranks on the CPU that run one program after another: torch is imported once, which takes seconds,
and all are copies.

`python -m benchmarks.worker_pool STORE END...` makes a rank for each end of a socket; JSON lines go
over it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from autopipe.backends.torch.child import end_with_parent, python_command
from autopipe.backends.torch.fork_server import rank_environment
from autopipe.backends.torch.launcher import read_reports
from autopipe.backends.torch.runtime.job import LOOPBACK, interface_of
from autopipe.ir.errors import LaunchError


class JsonSocket:
    """One end of such a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb")

    def fileno(self) -> int:
        """File descriptor for `select`."""
        return self._end.fileno()

    def send(self, form: dict[str, Any]) -> None:
        """Say it; a form has lists, dicts and scalars."""
        self._end.sendall(json.dumps(form).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Read the next object. Raises EOFError where the other end has closed."""
        text = self._file.readline()
        if not text.endswith(b"\n"):
            raise EOFError
        found: dict[str, Any] = json.loads(text)
        return found

    def close(self) -> None:
        """Say no more."""
        self._file.close()
        self._end.close()


PATIENCE_S = 300.0
"""Longest time in seconds that a rank waits for another one."""


@dataclass(frozen=True, slots=True)
class Task:
    """A program for the ranks to run together."""

    program: str
    """Its folder."""
    data: str
    """Samples, `FILE.npz`."""
    report: str
    """A new file, for one line a step."""
    steps: int
    recorded_steps: int
    """So many of them, from the first on, are run with the allocations of `recorded_rank` counted.
    """
    recorded_rank: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One rank's result of a task."""

    error: str = ""
    """The traceback of what ended it."""
    peak_memory_bytes: int = 0
    """Allocated at most, where that was counted."""
    processor_s: float = 0.0
    """Processor time of a step, on average over those without recording: all threads, waiting left
    out.
    """


def serve(rank: int, size: int, store: str, line: JsonSocket) -> NoReturn:
    """Run what comes until the other end closes; the first reply says that the world is there."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from autopipe.backends.torch.runtime.host import non_preempting_threads, pin_to_cores

    torch.set_num_threads(1)
    world = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(LOOPBACK)
    sys.dont_write_bytecode = True
    # The profiler writes there from C++; what fails is told in replies.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    patience = timedelta(seconds=PATIENCE_S)
    pin_to_cores(rank, size)
    with non_preempting_threads():
        dist.init_process_group(
            "gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=patience
        )
    gc.freeze()  # To look through torch after every program would take longer than a program.
    line.send(asdict(Reply()))
    while True:
        try:
            task = Task(**line.receive())
        except (EOFError, OSError):
            os._exit(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()), _as_main(task):
                reply = _run(rank, task)
        except BaseException:  # noqa: BLE001 - whatever ends a program is told, and the parent ends this process
            reply = Reply(error=traceback.format_exc())
        line.send(asdict(reply))
        # Groups end their threads where nothing refers to them any more; each polls a hundred times
        # a second.
        gc.collect()


def _run(number: int, task: Task) -> Reply:
    """Run the steps, and say what they took of this process."""
    counts = number == task.recorded_rank and task.recorded_steps > 0
    with allocations() if counts else contextlib.nullcontext([0]) as peak:
        found = runpy.run_path(
            str(Path(task.program) / f"rank_{number:03d}.py"), run_name="program"
        )
        rank: Any = found["rank"]
        rank.set_up()
        for _ in range(task.recorded_steps):
            rank.run(found["step"])
    others = task.steps - task.recorded_steps
    began = time.process_time()
    for _ in range(others):
        rank.run(found["step"])
    processor_s = (time.process_time() - began) / max(1, others)
    rank.reporter.report()
    # Parameters are numpy's, whom torch does not ask for memory; but for those that have moved into
    # rows of shares.
    moved = {id(each) for bucket in rank.reduction.shared for each in bucket.parameters}
    held = sum(int(each.nbytes) for each in rank.parameters.values() if id(each) not in moved)
    rank.transport.stop()
    return Reply(peak_memory_bytes=peak[0] + held if counts else 0, processor_s=processor_s)


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """Most bytes that torch has allocated at once in this thread, known after the block; what runs
    in it is slower.
    """
    from torch.profiler import ProfilerActivity, profile

    peak = [0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        yield peak
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events: list[Any] = [
        each for each in run.profiler.kineto_results.events() if each.name() == "[memory]"
    ]
    events.sort(key=lambda each: int(each.start_ns()))
    peak[0] = max(itertools.accumulate((int(each.nbytes()) for each in events), initial=0))


@contextlib.contextmanager
def _as_main(task: Task) -> Iterator[None]:
    """The module path and command line that a process of its own would have."""
    sys.argv = [
        "rank",
        "--device",
        "cpu",
        "--steps",
        str(task.steps),
        "--data",
        task.data,
        "--report",
        task.report,
    ]
    sys.path.insert(0, task.program)
    try:
        yield
    finally:
        sys.path.remove(task.program)
        for name in [name for name in sys.modules if name.startswith("stage_")]:
            del sys.modules[name]


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

    def run(
        self, program: Path, data: Path, steps: int, recorded: tuple[int, int], patience_s: float
    ) -> ProgramRun:
        """Run a program's first steps on the samples in `data`.

        `recorded` are a rank, and of how many of the steps, from the first on, its allocations are
        counted: those take longer. Raises LaunchError where a rank fails or does not end within
        `patience_s`.
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
        self._process = None
        self._lines = []
        self._folder = ""

    def _start(self) -> None:
        if self._process is not None:
            return
        self._folder = tempfile.mkdtemp(prefix="autopipe-pool-")
        pairs = [socket.socketpair() for _ in range(self.size)]
        self._lines = [JsonSocket(ours) for ours, _ in pairs]
        theirs = [end.fileno() for _, end in pairs]
        words = python_command("benchmarks.worker_pool", f"{self._folder}/store", *map(str, theirs))
        with rank_environment():
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
                env=dict(os.environ),
            )
        for _, end in pairs:
            end.close()
        self._replies(_START_S)

    def _replies(self, patience_s: float) -> list[Reply]:
        """One of each rank, in the order in which they came. Raises LaunchError with the first that
        failed.
        """
        end = time.monotonic() + patience_s
        found: list[Reply] = []
        waiting = dict(enumerate(self._lines))
        while waiting:
            ready, _, _ = select.select(
                list(waiting.values()), [], [], max(0.0, end - time.monotonic())
            )
            if not ready:
                raise LaunchError(
                    f"ranks {sorted(waiting)} of {self.size} did not end within {patience_s:g} s"
                )
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                try:
                    reply = Reply(**waiting.pop(rank).receive())
                except (EOFError, OSError):
                    raise LaunchError(f"the process of rank {rank} died") from None
                if reply.error:
                    raise LaunchError(reply.error.strip().splitlines()[-1], where=f"rank {rank}")
                found.append(reply)
        return found


_IMPORTED = ("torch", "torch.distributed", "torch._dynamo", "autopipe.backends.torch.runtime")
"""Modules that every rank needs; optimizers import torch._dynamo, a second each."""


def main() -> None:
    """Make the ranks, and end with the last of them."""
    store = sys.argv[1]
    ends = [int(end) for end in sys.argv[2:]]
    for name in _IMPORTED:
        importlib.import_module(name)
    parent = os.getpid()
    for rank, end in enumerate(ends):
        if os.fork() == 0:
            end_with_parent(parent)
            for other in ends:
                if other != end:  # Held open here, it would hide the other rank's death.
                    os.close(other)
            serve(rank, len(ends), store, JsonSocket(socket.socket(fileno=end)))
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


if __name__ == "__main__":
    main()
