"""Runs a one-device program of one stage and writes what a forward and a backward take, in a process of its own.

python -m autopipe.backends.torch.profiler.whole_worker FILE PROGRAM DEVICE SECONDS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from autopipe.backends.torch.profiler.timed_program import TimedProgram
from autopipe.backends.torch.profiler.watch import repeated


def main(target: Path, program: Path, device: str, seconds: float) -> None:
    """Measure `program` and write two numbers of seconds to `target`, 0 for a backward where there is none.

    A forward is what its generated function takes, a backward what autograd does.
    """
    timed = TimedProgram.of(program, target.with_suffix(".npz"), torch.device(device))

    def run() -> list[float]:
        timed.rank.run(timed.step)
        own = timed.inside.means()
        return [own["0F"], own.get("0B", 0.0)]

    target.write_text(json.dumps([each.seconds for each in repeated(run, seconds)]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
