"""Runs a one-device program and writes what its tasks take besides their operators, in a process of its own.

python -m autopipe.backends.torch.profiler.task_worker FILE PROGRAM DEVICE SECONDS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from autopipe.backends.torch.profiler.timed_program import CallTimestamps, TimedProgram, repeated


def main(target: Path, program: Path, device: str, seconds: float) -> None:
    """Measure `program` and write four numbers of seconds to `target`.

    They are what a forward and a backward of its first stage take besides their operators, how much longer a
    micro-batch of the second takes, whose backward is split, and what an update takes.

    A forward's operators are what its generated function takes, a backward's what autograd does. Reading samples
    counts.
    """
    timed = TimedProgram.of(program, target.with_suffix(".npz"), torch.device(device))
    rank, first = timed.rank, timed.rank.stages[0]
    whole = CallTimestamps(timed.watch)
    whole.around(first, "forward")
    whole.around(first, "backward")
    whole.around(rank.optimizer, "step")
    whole.around(rank.optimizer, "zero_grad")

    def run() -> list[float]:
        """Average seconds of each kind of task, from two steps."""
        own, found = timed.seconds_of(timed.inside), timed.seconds_of(whole)
        tasks = [found["forward"] - own["0F"], found["backward"] - own["0B"]]
        lengths = [0.0, 0.0]
        for span in rank.clock.spans():
            lengths[int(span.task[0])] += span.end - span.start
        split = (lengths[1] - lengths[0]) / rank.manifest.micro_batches
        return [*(max(0.0, each) for each in (*tasks, split)), found["step"] + found["zero_grad"]]

    target.write_text(json.dumps([each.seconds for each in repeated(run, seconds)]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
