"""One line a step: loss, time, samples a second, bubble measured and predicted, peak memory.

How long tasks take, on the device that computes them.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from autopipe.backends.torch.runtime.failures import Options
from autopipe.backends.torch.runtime.heartbeat import Heartbeat
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.errors import LaunchError
from autopipe.ir.program import KINDS, by_kind


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of a step, over all ranks."""

    step: int
    loss: float | None
    step_time_s: float
    samples_per_s: float
    bubble_rate: float
    predicted_bubble_rate: float
    peak_memory_bytes: tuple[int, ...]
    """So far, by rank."""
    communication_bytes: dict[str, int]
    """Bytes moved by all ranks' exchanges, by kind (`ir/program.py`)."""

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
"""Seconds between reports of short steps: to exchange figures, and print and write what they say, takes as long as some
tasks of a small model, and whoever reads it wants a processor that a rank needs."""
_MOST_STEPS = 16
"""In one report, since steps may turn out longer than those before."""


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of one step on one rank."""

    loss: float
    """The rank's share."""
    bad_stage: float
    """The first stage, and its micro-batch, whose loss is no number; `_FINE` where all are."""
    bad_micro_batch: float
    seconds: float
    busy_s: float
    moved: tuple[float, ...]
    """Bytes of its exchanges, by kind (`ir/program.py`)."""

    def numbers(self) -> list[float]:
        """To be exchanged."""
        return [self.loss, self.bad_stage, self.bad_micro_batch, self.seconds, self.busy_s, *self.moved]

    @staticmethod
    def of(numbers: Sequence[float]) -> _Figures:
        """Decode the figures from numbers."""
        loss, stage, micro_batch, seconds, busy, *moved = numbers
        return _Figures(loss, stage, micro_batch, seconds, busy, tuple(moved))


class LossSource(Protocol):
    """A stage as reports see it: its share of the losses."""

    @property
    def losses(self) -> Mapping[int, torch.Tensor]: ...
    @property
    def loss_share(self) -> float: ...


class ReportContext(Protocol):
    """The rank as its reports see it."""

    @property
    def number(self) -> int: ...
    @property
    def train(self) -> bool: ...
    @property
    def steps_done(self) -> int: ...
    @property
    def options(self) -> Options: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def stages(self) -> Mapping[int, LossSource]: ...


class Reporter:
    """Keeps each step's figures. All ranks exchange them, those of short steps several at a time, and rank 0 prints
    them. Stops all ranks at a loss that is no number."""

    def __init__(self, rank: ReportContext) -> None:
        self._rank = rank
        self._kept: dict[int, _Figures] = {}
        """By step."""
        self._together = 1
        """Steps in a report: as many on every rank."""

    def end_step(self, seconds: float) -> None:
        """Report the step that has just ended, or keep it for the next report. Raises LaunchError as `report` does."""
        rank = self._rank
        with rank.heartbeat.waiting():  # on a GPU, for what it has not done yet
            spans = rank.clock.spans()
        busy = sum(span.end - span.start for span in spans)
        moved = tuple(float(rank.transport.traffic[kind]) for kind in KINDS)
        self._kept[rank.steps_done] = _Figures(*self._loss(), seconds, busy, moved)
        if rank.options.trace is not None:
            self._trace([asdict(span) for span in spans])
        if len(self._kept) >= self._together:
            self.report()

    def report(self) -> None:
        """Exchange what is kept; print it, and add it to the report file. All ranks together, after the same step.

        Raises LaunchError for a loss of NaN or infinity.
        """
        kept, self._kept = self._kept, {}
        if not kept:
            return
        numbers = [number for figures in kept.values() for number in figures.numbers()]
        gathered = self._rank.transport.gather_numbers([float(peak_memory(self._rank.device)), *numbers])
        peaks = tuple(int(peak) for peak, *_ in gathered)
        width = len(numbers) // len(kept)
        steps = {
            step: [_Figures.of(own[1 + index * width :][:width]) for own in gathered] for index, step in enumerate(kept)
        }
        reports: list[StepReport] = []
        try:
            for step, by_rank in steps.items():
                _check(step, by_rank)
                reports.append(self._report(step, by_rank, peaks))
        finally:
            self._show(reports)
        slowest = max(each.step_time_s for each in reports)
        self._together = min(_MOST_STEPS, max(1, int(_EVERY_S / slowest)))

    def _show(self, reports: Sequence[StepReport]) -> None:
        """Once for all ranks."""
        file = self._rank.options.report
        if not reports or self._rank.number:
            return
        print("\n".join(each.line() for each in reports), flush=True)
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(asdict(each)) + "\n" for each in reports)

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

    def _report(self, step: int, by_rank: Sequence[_Figures], peaks: tuple[int, ...]) -> StepReport:
        manifest = self._rank.manifest
        seconds = max(each.seconds for each in by_rank)
        return StepReport(
            step=step,
            loss=sum(each.loss for each in by_rank) if self._rank.train else None,
            step_time_s=seconds,
            samples_per_s=manifest.batch_size / seconds,
            bubble_rate=1.0 - sum(each.busy_s for each in by_rank) / (len(by_rank) * seconds),
            predicted_bubble_rate=manifest.predicted_bubble,
            peak_memory_bytes=peaks,
            communication_bytes=_added_up([each.moved for each in by_rank]),
        )

    def _trace(self, spans: list[dict[str, object]]) -> None:
        """Add the step's spans to this rank's file, one JSON object a line."""
        folder = self._rank.options.trace
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank_{self._rank.number:03d}.jsonl").open("a", encoding="utf-8") as file:
            form = {"step": self._rank.steps_done, "began": self._rank.clock.began, "spans": spans}
            file.write(json.dumps(form) + "\n")


def _check(step: int, by_rank: Sequence[_Figures]) -> None:
    """Raises LaunchError for a loss of NaN or infinity."""
    for rank, each in enumerate(by_rank):
        if each.bad_stage != _FINE:
            raise LaunchError(
                f"the loss is not a finite number at step {step}",
                hint="lower the learning rate or look at the data",
                where=f"rank {rank}, stage {int(each.bad_stage)}, micro-batch {int(each.bad_micro_batch)}",
            )


def _added_up(moved: Sequence[Sequence[float]]) -> dict[str, int]:
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
"""Memory that Python and torch take before a program loads anything."""


def peak_memory(device: torch.device) -> int:
    """Bytes at most: of the allocator on a GPU; on the CPU of the resident set, beyond Python and torch themselves."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _resident_peak() - _INTERPRETER


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """A task's compute time, in seconds from the start of the step."""

    task: str
    start: float
    end: float


Mark = float | torch.cuda.Event


class Clock:
    """Marks in time: the host's clock on the CPU, events on a CUDA stream, which cost the stream nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin: Mark = 0.0
        self.began = 0.0
        """When the step began, in seconds since 1970: what puts the steps of several ranks on one axis."""
        self._spans: list[tuple[str, Mark, Mark]] = []

    def mark(self) -> Mark:
        """Now."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """Start a step's measurements anew."""
        self._spans = []
        self.began = time.time()
        self._begin = self.mark()

    def add(self, task: str, start: Mark) -> None:
        """A task that started at `start` and ends now."""
        self._spans.append((task, start, self.mark()))

    def spans(self) -> list[MeasuredSpan]:
        """The step's tasks; waits for the device to have done them."""
        if self._cuda:
            torch.cuda.synchronize()
        return [MeasuredSpan(task, self._since(start), self._since(end)) for task, start, end in self._spans]

    def _since(self, mark: Mark) -> float:
        if isinstance(mark, float):
            assert isinstance(self._begin, float)
            return mark - self._begin
        assert not isinstance(self._begin, float)
        return float(self._begin.elapsed_time(mark)) / 1000.0
