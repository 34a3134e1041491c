"""Runs a one-device program of one stage and writes what a forward and a backward take, in a process of its own.

python -m autopipe.backends.torch.profiler.whole_worker FILE PROGRAM DEVICE SECONDS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from autopipe.backends.torch.profiler.timed_program import CallTimestamps, TimedProgram, repeated


def main(target: Path, program: Path, device: str, seconds: float) -> None:
    """Measure `program` and write four numbers of seconds to `target`, 0 for those of a backward where there is none.

    They are what a forward's and a backward's operators take, and what both tasks take besides them: a forward's are
    its generated function, a backward's what autograd does.
    """
    timed = TimedProgram.of(program, target.with_suffix(".npz"), torch.device(device))
    tasks = CallTimestamps(timed.watch)
    for task in ("forward", "backward"):
        tasks.around(timed.rank.stages[0], task)

    def run() -> list[float]:
        inside, whole = timed.seconds_of(timed.inside), timed.seconds_of(tasks)
        own = inside["0F"], inside.get("0B", 0.0)
        around = whole["forward"] - own[0], whole.get("backward", 0.0) - own[1]
        return [*own, *(max(0.0, each) for each in around)]

    target.write_text(json.dumps([each.seconds for each in repeated(run, seconds)]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
