"""Runs a one-device program of one stage in several processes at once and writes the processor time that a step takes.

python -m autopipe.backends.torch.profiler.crowd_worker FILE PROGRAM COUNT,… SECONDS

A number for each count of processes, in order; the seconds are shared by all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from autopipe.backends.torch.profiler.timed_program import TimedProgram
from autopipe.backends.torch.profiler.watch import repeated

_FORK = multiprocessing.get_context("fork")
"""What is imported once need not be imported by each process; none of them has had a thread before."""


def main(target: Path, program: Path, counts: list[int], seconds: float) -> None:
    """Measure `program` with so many processes at a time and write the median of each count to `target`.

    Where its memory happens to lie makes a process faster or slower for good: each count has about as many processes.
    """
    rounds = [max(1, max(counts) // count) for count in counts]
    each = seconds / sum(rounds)
    found = [
        statistics.median(time for _ in range(turns) for time in _of_crowd(target, program, count, each))
        for count, turns in zip(counts, rounds, strict=True)
    ]
    target.write_text(json.dumps(found), encoding="utf-8")


def _of_crowd(target: Path, program: Path, count: int, seconds: float) -> list[float]:
    """The processor time in seconds of a step's forward and backward, in each of the processes."""
    barrier = _FORK.Barrier(count)
    pipes, processes = [], []
    for number in range(count):
        ours, theirs = _FORK.Pipe(duplex=False)
        data = target.with_suffix(f".{count}.{number}.npz")
        process = _FORK.Process(target=_member, args=(program, data, barrier, seconds, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _member(program: Path, data: Path, barrier: Barrier, seconds: float, answer: Connection) -> None:
    timed = TimedProgram.of(program, data, torch.device("cpu"))

    def run() -> list[float]:
        timed.rank.run(timed.step)
        return [sum(timed.inside.means().values())]

    run()
    barrier.wait()
    answer.send(repeated(run, seconds)[0].seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
