"""A one-device program in this process, and marks around what it calls."""

from __future__ import annotations

import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopipe.backends.torch.profiler.watch import Mark, Stopwatch
from autopipe.backends.torch.runtime.data import save_samples
from autopipe.backends.torch.runtime.rank import Rank


class CallTimestamps:
    """Marks around calls, by name, as a context in which they are made."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._calls: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []
        """Attributes with what they are without marks and with them."""
        self._found: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

    def around(self, owner: Any, name: str, key: Callable[[], str] | None = None) -> None:
        """Time every call of an attribute; note it under what `key` says behind it, under its name else."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **settings: Any) -> Any:
            start = self._watch.mark()
            result = call(*arguments, **settings)
            self._found[name if key is None else key()].append((start, self._watch.mark()))
            return result

        self._calls.append((owner, name, call, timed))

    def __enter__(self) -> None:
        for owner, name, _, timed in self._calls:
            setattr(owner, name, timed)

    def __exit__(self, *error: object) -> None:
        for owner, name, call, _ in reversed(self._calls):
            setattr(owner, name, call)

    def means(self) -> dict[str, float]:
        """Seconds of a call by name, and forget them."""
        spans = self._watch.spans
        found = {name: float(np.mean([spans(each)[0] for each in own])) for name, own in self._found.items()}
        self._found.clear()
        return found


@dataclass(frozen=True, slots=True)
class TimedProgram:
    """Ready to run."""

    rank: Rank
    step: Callable[[], None]
    watch: Stopwatch
    inside: CallTimestamps
    """Seconds inside generated functions and autograd, under the task's stage and phase, such as `0F`."""

    @staticmethod
    def of(program: Path, data: Path, device: torch.device) -> TimedProgram:
        """The program in folder `program`, set up. One step's samples are drawn and written to `data`, from where it
        reads them: drawing is no part of a step."""
        sys.path.insert(0, str(program))
        sys.argv = ["rank_000.py", "--device", device.type, "--data", str(data)]
        names = runpy.run_path(str(program / "rank_000.py"))
        rank: Rank = names["rank"]
        save_samples(rank.manifest, data)

        def task() -> str:
            return rank.task[:2]

        rank.set_up()
        watch = Stopwatch(device)
        inside = CallTimestamps(watch)
        for stage in rank.stages.values():
            inside.around(stage, "_forward", task)
        inside.around(torch.autograd, "backward", task)
        return TimedProgram(rank, names["step"], watch, inside)

    def seconds_of(self, marks: CallTimestamps) -> dict[str, float]:
        """Run a step with these marks alone, for others would count in what they are made around; seconds of a call by
        name."""
        with marks:
            self.rank.run(self.step)
        return marks.means()
