"""Runs a one-device program and writes the medians of its forwards and backwards, in a process of its own.

python -m autopipe.backends.torch.profiler.task_worker PROGRAM FILE DEVICE SECONDS
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from autopipe.backends.torch.profiler.watch import Mark, Watch, repeated
from autopipe.backends.torch.runtime.rank import Rank
from autopipe.backends.torch.runtime.stage import Stage


def main(program: Path, target: Path, device: str, seconds: float) -> None:
    """Measure `program` and write two numbers of seconds to `target`."""
    data = target.with_suffix(".npz")
    sys.path.insert(0, str(program))
    sys.argv = ["rank_000.py", "--device", device, "--data", str(data)]
    names = runpy.run_path(str(program / "rank_000.py"))
    rank: Rank = names["rank"]
    (given,) = rank.manifest.inputs
    np.savez(data, x=np.ones(given.shape, given.dtype))
    rank.set_up()
    found = repeated(_Tasks(rank, names["step"]).run, seconds)
    target.write_text(json.dumps([each.seconds for each in found]), encoding="utf-8")


_TASKS = ("forward", "backward")


class _Tasks:
    """The tasks of a rank's only stage, with marks around them."""

    def __init__(self, rank: Rank, step: Callable[[], None]) -> None:
        self._watch = Watch(rank.device)
        self._rank, self._step = rank, step
        self._marks: dict[str, list[tuple[Mark, Mark]]] = {}
        stage: Stage = rank.stages[0]
        for name in _TASKS:
            setattr(stage, name, self._timed(name, getattr(stage, name)))

    def _timed(self, name: str, task: Callable[[int], None]) -> Callable[[int], None]:
        def timed(micro_batch: int) -> None:
            start = self._watch.mark()
            task(micro_batch)
            self._marks.setdefault(name, []).append((start, self._watch.mark()))

        return timed

    def run(self) -> list[float]:
        """Seconds of a forward and of a backward, on average over one step."""
        self._marks.clear()
        self._rank.transport.traffic.clear()
        self._step()
        for stage in self._rank.stages.values():
            stage.end_step()
        return [float(np.mean([self._watch.spans(each)[0] for each in self._marks[name]])) for name in _TASKS]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
