"""One line a step: loss, time, samples a second, bubble measured and predicted, peak memory."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autopipe.ir.errors import LaunchError
from autopipe.ir.traffic import KINDS, by_kind

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step took, over all ranks."""

    step: int
    loss: float | None
    step_time_s: float
    samples_per_s: float
    bubble_rate: float
    predicted_bubble_rate: float
    peak_memory_bytes: tuple[int, ...]
    communication_bytes: dict[str, int]
    """What all ranks' exchanges moved, by kind (`ir/traffic.py`)."""

    def line(self) -> str:
        """The report as a person reads it."""
        loss = "" if self.loss is None else f"loss {self.loss:.6f}  "
        return (
            f"step {self.step}  {loss}{self.step_time_s * 1e3:.1f} ms  {self.samples_per_s:.1f} samples/s  "
            f"bubble {self.bubble_rate:.1%} (predicted {self.predicted_bubble_rate:.1%})  "
            f"peak memory {max(self.peak_memory_bytes) / 2**20:.0f} MiB"
        )


_FINE = -1.0
_EVERY_S = 0.25
"""Seconds between reports: to print and write one takes as long as some tasks of a small model, the other ranks wait
for it, and whoever reads it wants a processor that a rank needs."""


class Reporter:
    """Gathers the ranks' figures after each step; rank 0 prints them, those of short steps several at a time. Stops all
    ranks at a loss that is no number."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._held: list[StepReport] = []
        self._shown = -math.inf

    def end_step(self, seconds: float) -> None:
        """Report the step that has just ended. Raises LaunchError for a loss of NaN or infinity."""
        rank = self._rank
        with rank.pulse.waiting():  # on a GPU, for what it has not done yet
            spans = rank.clock.spans()
        busy = sum(span.end - span.start for span in spans)
        loss, bad_stage, bad_micro_batch = self._loss()
        numbers = [loss, float(bad_stage), float(bad_micro_batch), seconds, busy, float(peak_memory(rank.device))]
        moved = [float(rank.transport.traffic[kind]) for kind in KINDS]
        gathered = rank.transport.gather_numbers(numbers + moved)
        for number, (_, stage, micro_batch, *_) in enumerate(gathered):
            if stage != _FINE:
                raise LaunchError(
                    f"the loss is not a finite number at step {rank.steps_done}",
                    hint="lower the learning rate or look at the data",
                    where=f"rank {number}, stage {int(stage)}, micro-batch {int(micro_batch)}",
                )
        if rank.options.trace is not None:
            self._trace([asdict(span) for span in spans])
        if rank.number == 0:
            self._held.append(self._report(gathered))
            if time.perf_counter() - self._shown >= _EVERY_S:
                self.show()

    def show(self) -> None:
        """Print the reports that are held, and add them to the report file."""
        held, self._held = self._held, []
        file = self._rank.options.report
        if held:
            print("\n".join(each.line() for each in held), flush=True)
        if held and file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(asdict(each)) + "\n" for each in held)
        self._shown = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if self._rank.number == 0:
            print(text, flush=True)

    def _loss(self) -> tuple[float, float, float]:
        """This rank's share of the step's loss, and the first stage and micro-batch whose loss is no number."""
        total = 0.0
        for number, stage in self._rank.stages.items():
            for micro_batch, loss in sorted(stage.losses.items()):
                value = float(loss)
                if not math.isfinite(value):
                    return 0.0, float(number), float(micro_batch)
                total += value * stage.loss_share
        return total, _FINE, _FINE

    def _report(self, gathered: list[list[float]]) -> StepReport:
        rank = self._rank
        seconds = max(numbers[3] for numbers in gathered)
        return StepReport(
            step=rank.steps_done,
            loss=sum(numbers[0] for numbers in gathered) if rank.train else None,
            step_time_s=seconds,
            samples_per_s=rank.manifest.batch_size / seconds,
            bubble_rate=1.0 - sum(numbers[4] for numbers in gathered) / (len(gathered) * seconds),
            predicted_bubble_rate=rank.manifest.predicted_bubble,
            peak_memory_bytes=tuple(int(numbers[5]) for numbers in gathered),
            communication_bytes=_added_up([numbers[6:] for numbers in gathered]),
        )

    def _trace(self, spans: list[dict[str, object]]) -> None:
        """Add the step's spans to this rank's file, one JSON object a line."""
        folder = self._rank.options.trace
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank_{self._rank.number:03d}.jsonl").open("a", encoding="utf-8") as file:
            form = {"step": self._rank.steps_done, "began": self._rank.clock.began, "spans": spans}
            file.write(json.dumps(form) + "\n")


def _added_up(moved: list[list[float]]) -> dict[str, int]:
    """The sums over ranks, by kind."""
    return by_kind(dict(zip(KINDS, (int(sum(each)) for each in zip(*moved, strict=True)), strict=True)))


_STATUS = Path("/proc/self/status")


def _resident_peak() -> int:
    """Bytes of the process's resident set at its largest so far.

    What Linux counts as its usage (`getrusage`) begins with what the process that started it had, a launcher's too.
    """
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):  # "high water mark"
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_INTERPRETER = _resident_peak()
"""What Python and torch take before a program loads anything."""


def peak_memory(device: torch.device) -> int:
    """Bytes at most: of the allocator on a GPU; on the CPU of the resident set, beyond Python and torch themselves."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _resident_peak() - _INTERPRETER
