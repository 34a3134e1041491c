"""Processes that keep other cores busy while one is measured, as other ranks do in a run.

python -m autopipe.backends.torch.profiler.company THREADS
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from autopipe.backends.torch.launcher import rank_environment


@contextlib.contextmanager
def company(processes: int, threads: int) -> Iterator[None]:
    """Keep so many processes, of so many threads each, at work for the length of the block."""
    with rank_environment():
        command = [sys.executable, "-m", "autopipe.backends.torch.profiler.company", str(threads)]
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


def _work(threads: int) -> None:
    """Train small layers, until the process that asked for it kills this one or ends."""
    torch.set_num_threads(threads)
    weight = torch.eye(256, requires_grad=True)
    parent = os.getppid()
    sys.stdout.write("!")
    sys.stdout.flush()
    while os.getppid() == parent:
        rows = torch.ones(256, 256)
        for _ in range(8):
            rows = torch.layer_norm(torch.relu(rows @ weight) + rows, (256,))
        rows.sum().backward()
        weight.grad = None


if __name__ == "__main__":
    _work(int(sys.argv[1]))
