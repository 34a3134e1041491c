"""One process of a crew: joins the world once, then runs its rank's file of each program that it is given."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from autopipe.backends.torch.crew.line import JsonSocket
from autopipe.backends.torch.interfaces import LOOPBACK, interface_of

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
    """So many of them, from the first on, are run with the allocations of `recorded_rank` counted."""
    recorded_rank: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One rank's result of a task."""

    error: str = ""
    """The traceback of what ended it."""
    peak_memory_bytes: int = 0
    """Allocated at most, where that was counted."""
    processor_s: float = 0.0
    """Processor time of a step, on average over those without recording: all threads, waiting left out."""


def serve(rank: int, size: int, store: str, line: JsonSocket) -> NoReturn:
    """Run what comes until the other end closes; the first reply says that the world is there."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from autopipe.backends.torch.runtime.gloo_threads import patient_threads
    from autopipe.backends.torch.runtime.processors import pin_to_cores

    torch.set_num_threads(1)
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(LOOPBACK)
    sys.dont_write_bytecode = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # The profiler writes there from C++; what fails is told in replies.
    patience = timedelta(seconds=PATIENCE_S)
    pin_to_cores(rank, size)
    with patient_threads():
        dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=patience)
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
        # Groups end their threads where nothing refers to them any more; each polls a hundred times a second.
        gc.collect()


def _run(number: int, task: Task) -> Reply:
    """Run the steps, and say what they took of this process."""
    from autopipe.backends.torch.crew.allocations import Allocations, parameter_bytes

    allocations, counts = Allocations(), number == task.recorded_rank and task.recorded_steps > 0
    with allocations.recorded() if counts else contextlib.nullcontext():
        found = runpy.run_path(str(Path(task.program) / f"rank_{number:03d}.py"), run_name="program")
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
    held = parameter_bytes(rank)
    rank.transport.stop()
    return Reply(peak_memory_bytes=allocations.peak_bytes + held if counts else 0, processor_s=processor_s)


@contextlib.contextmanager
def _as_main(task: Task) -> Iterator[None]:
    """The module path and command line that a process of its own would have."""
    sys.argv = ["rank", "--device", "cpu", "--steps", str(task.steps), "--data", task.data, "--report", task.report]
    sys.path.insert(0, task.program)
    try:
        yield
    finally:
        sys.path.remove(task.program)
        for name in [name for name in sys.modules if name.startswith("stage_")]:
            del sys.modules[name]
