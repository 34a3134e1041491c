"""Devices that share a processor: what runs at once goes on at the same speed.

The discipline is egalitarian processor sharing, about what a fair scheduler of an operating system does: Kleinrock,
"Time-shared systems: a theoretical treatment", Journal of the ACM 14(2), 1967. Where it was measured that
tasks of so many ranks take more of a processor's time, since they share its caches too, all go on slower by that: also
the only one that runs, which finds there what others left.
"""

from __future__ import annotations

import heapq
import math

from autopipe.ir.prediction import Processor


class SharedProcessor:
    """A processor and the tasks that run on it now, from event to event; times in seconds, never going back."""

    def __init__(self, processor: Processor) -> None:
        self._slowdown = processor.slowdown
        self._now = 0.0
        self._worked = 0.0
        """Seconds of its work that a task which has run since the start has had: all that run gain alike."""
        self._running: list[tuple[float, int, int]] = []
        """What `_worked` is when a task ends, in which order it began, and the task: a heap."""
        self._begun = 0

    def begin(self, task: int, seconds: float, now: float) -> None:
        """A device starts a task that takes so long on a processor of its own."""
        self._go_on_to(now)
        self._begun += 1
        heapq.heappush(self._running, (self._worked + seconds, self._begun, task))

    @property
    def next_end(self) -> float:
        """When the first task ends if no other begins; infinite where none runs."""
        if not self._running:
            return math.inf
        return self._now + (self._running[0][0] - self._worked) / self._speed

    def end(self, now: float) -> int:
        """The task that ends now, which is `next_end`."""
        self._go_on_to(now)
        self._worked, _, task = heapq.heappop(self._running)
        return task

    @property
    def _speed(self) -> float:
        return 1.0 / (len(self._running) * self._slowdown)

    def _go_on_to(self, now: float) -> None:
        if self._running:
            self._worked += (now - self._now) * self._speed
        self._now = now
