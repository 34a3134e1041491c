"""Runs a one-device program and writes what its tasks take besides their operators, in a process of its own.

python -m autopipe.backends.torch.profiler.task_worker PROGRAM FILE DEVICE SECONDS
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopipe.backends.torch.profiler.watch import Mark, Watch, repeated
from autopipe.backends.torch.runtime.rank import Rank


def main(program: Path, target: Path, device: str, seconds: float) -> None:
    """Measure `program` and write four numbers of seconds to `target`.

    They are what a forward and a backward of its first stage take besides their operators, how much longer a
    micro-batch of the second takes, whose backward is split, and what an update takes.

    A forward's operators are what its generated function takes, a backward's what autograd does.
    """
    data = target.with_suffix(".npz")
    sys.path.insert(0, str(program))
    sys.argv = ["rank_000.py", "--device", device, "--data", str(data)]
    inside = _Marks(Watch(torch.device(device)))
    stage = importlib.import_module("stage_00")
    inside.around(stage, "forward")
    names = runpy.run_path(str(program / "rank_000.py"))
    rank: Rank = names["rank"]
    np.savez(data, **{each.name: np.ones(each.shape, np.float32) for each in rank.manifest.inputs})  # type: ignore[arg-type]
    rank.set_up()
    inside.around(torch.autograd, "backward", lambda: rank.task[:2])
    whole = _Marks(inside.watch)
    whole.around(rank.stages[0], "forward")
    whole.around(rank.stages[0], "backward")
    whole.around(rank.optimizer, "step")
    whole.around(rank.optimizer, "zero_grad")

    def run() -> list[float]:
        """Those seconds of one step, of tasks on average."""
        rank.run(names["step"])
        own, found = inside.means(), whole.means()
        tasks = [max(0.0, found["forward"] - own["forward"]), max(0.0, found["backward"] - own["0B"])]
        lengths = [0.0, 0.0]
        for span in rank.clock.spans():
            lengths[int(span.task[0])] += span.end - span.start
        split = (lengths[1] - lengths[0]) / rank.manifest.micro_batches
        return [*tasks, max(0.0, split), found["step"] + found["zero_grad"]]

    target.write_text(json.dumps([each.seconds for each in repeated(run, seconds)]), encoding="utf-8")


class _Marks:
    """Marks around calls, by name."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._found: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

    def around(self, owner: Any, name: str, key: Callable[[], str] | None = None) -> None:
        """Time every call of an attribute from now on; note it under what `key` says then, under its name else."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **settings: Any) -> Any:
            start = self.watch.mark()
            result = call(*arguments, **settings)
            self._found[name if key is None else key()].append((start, self.watch.mark()))
            return result

        setattr(owner, name, timed)

    def means(self) -> dict[str, float]:
        """Seconds of a call by name, and forget them."""
        found = {name: float(np.mean([self.watch.spans(each)[0] for each in own])) for name, own in self._found.items()}
        self._found.clear()
        return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
