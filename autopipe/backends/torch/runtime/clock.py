"""How long tasks take, on the device that computes them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


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
