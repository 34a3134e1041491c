"""Processes that keep other cores busy while one is measured, as other ranks do in a run.

python -m autopipe.backends.torch.profiler.company THREADS [PROGRAM]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from autopipe.backends.torch.child import python_command
from autopipe.backends.torch.launcher import rank_environment
from autopipe.backends.torch.profiler.timed_program import TimedProgram


@contextlib.contextmanager
def company(processes: int, threads: int, program: Path | None) -> Iterator[None]:
    """Keep so many processes, of so many threads each, at work for the length of the block.

    They run the one-device program in folder `program`: what is measured shares memory and caches with work like its
    own. Small layers where there is none, or it does not run. Their samples go beside the folder.
    """
    with rank_environment():
        command = python_command("autopipe.backends.torch.profiler.company", str(threads))
        if program is not None:
            command.append(str(program))
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for _ in range(processes)
        ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.read(1)
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _work(threads: int, program: Path | None) -> None:
    """Train, until the process that asked for it kills this one or ends."""
    torch.set_num_threads(threads)
    parent = os.getppid()
    step = (None if program is None else _model(program)) or _layers()
    os.write(1, b"!")
    while os.getppid() == parent:
        step()


def _model(program: Path) -> Callable[[], None] | None:
    """A step of a program; None where it does not run."""
    try:
        timed = TimedProgram.of(program, program.with_suffix(f".{os.getpid()}.npz"), torch.device("cpu"))

        def step() -> None:
            timed.rank.run(timed.step)

        step()
    except Exception:  # noqa: BLE001 - whatever a model may end with: it is measured without its like beside it
        return None
    return step


def _layers() -> Callable[[], None]:
    """A step of small layers."""
    weight = torch.eye(256, requires_grad=True)

    def step() -> None:
        rows = torch.ones(256, 256)
        for _ in range(8):
            rows = torch.layer_norm(torch.relu(rows @ weight) + rows, (256,))
        rows.sum().backward()
        weight.grad = None

    return step


if __name__ == "__main__":
    _work(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
