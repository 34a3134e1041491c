"""Marks in time on the device that is measured, and medians of what lies between them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopipe.ir.measured_costs import Timing

LEAST = 5
"""Repetitions of even the slowest work."""
MOST = 200

Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times work on one device: on a CPU by the processor time of a thread that works alone, which other processes on
    the machine do not add to, and by the clock where there are several; by events on a CUDA stream."""

    device: torch.device

    def mark(self) -> Mark:
        """Now."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def spans(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds from each mark to the next, without what looking at the clock takes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        own = self._looking()
        return [max(0.0, _between(first, second) - own) for first, second in itertools.pairwise(marks)]

    def _looking(self) -> float:
        if self.device.type == "cuda":
            return 0.0
        marks = [self.mark() for _ in range(9)]
        return statistics.median(_between(first, second) for first, second in itertools.pairwise(marks))


def _between(first: Mark, second: Mark) -> float:
    if isinstance(first, float):
        assert isinstance(second, float)
        return second - first
    assert not isinstance(second, float)
    return float(first.elapsed_time(second)) / 1000.0


def repeated(run: Callable[[], Sequence[float]], seconds: float) -> list[Timing]:
    """`run` gives what each of several parts took; the median of each, after a warm-up, of as many runs as `seconds` of
    the clock allow."""
    run()
    started = time.perf_counter()
    found: list[Sequence[float]] = []
    while len(found) < LEAST or (len(found) < MOST and time.perf_counter() - started < seconds):
        found.append(run())
    return [timing_of(each) for each in zip(*found, strict=True)]


def timing_of(seconds: Sequence[float]) -> Timing:
    """The median of several runs, and how far they lie apart."""
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median,) * 3
    return Timing(median, (high - low) / median if median else 0.0, len(seconds))


def averaged(timings: Sequence[Timing]) -> Timing:
    """Average of the timings."""
    return Timing(
        statistics.fmean(each.seconds for each in timings),
        statistics.fmean(each.spread for each in timings),
        timings[0].repetitions,
    )
