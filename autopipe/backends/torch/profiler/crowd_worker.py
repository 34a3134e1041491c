"""Runs a one-device program of one stage in several processes at once and writes the processor time that a step takes.

python -m autopipe.backends.torch.profiler.crowd_worker FILE PROGRAM COUNT,… SECONDS

A number for each count of processes, in order; the seconds are shared by all.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autopipe.backends.torch.child import end_with
from autopipe.backends.torch.profiler.timed_program import TimedProgram
from autopipe.backends.torch.profiler.watch import repeated
from autopipe.backends.torch.runtime.processors import keep_to_processors


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes: it says a byte when it is ready, waits for one, and answers with a number."""

    process: int
    answers: int
    go: int


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
    """The processor time in seconds of a step's forward and backward, in each of the processes.

    Raises OSError or ValueError where one fails.
    """
    members: list[Member] = []
    for number in range(count):
        data = target.with_suffix(f".{count}.{number}.npz")
        members.append(_begun(program, data, seconds, members, count))
    for each in members:
        os.read(each.answers, 1)
    for each in members:
        os.write(each.go, b"!")
    found = []
    for each in members:
        with open(each.answers, encoding="utf-8") as answers:
            found.append(float(answers.read()))
        os.close(each.go)
        os.waitpid(each.process, 0)
    return found


def _begun(program: Path, data: Path, seconds: float, before: Sequence[Member], count: int) -> Member:
    """One of `count` processes that measure the program, on the processors that a rank would have; forked, so that what
    is imported here need not be imported again.
    """
    (answers, answer), (wait, go) = os.pipe(), os.pipe()
    parent = os.getpid()
    process = os.fork()
    if process:
        os.close(answer)
        os.close(wait)
        return Member(process, answers, go)
    end_with(parent)
    for each in before:
        os.close(each.go)  # Or those would wait for ever if their parent ended.
    try:
        keep_to_processors(len(before), count)
        os.write(answer, str(_measured(program, data, seconds, answer, wait)).encode())
    except BaseException:  # noqa: BLE001 - a forked process must not go on with what its parent is doing
        traceback.print_exc()
    os._exit(0)


def _measured(program: Path, data: Path, seconds: float, answer: int, wait: int) -> float:
    timed = TimedProgram.of(program, data, torch.device("cpu"))

    def run() -> list[float]:
        return [sum(timed.seconds_of(timed.inside).values())]

    run()
    os.write(answer, b" ")
    os.read(wait, 1)
    return repeated(run, seconds)[0].seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
