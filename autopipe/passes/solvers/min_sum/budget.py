"""How much a search may do: counted, so that equal requests give equal answers; the clock only ends what a slow machine
cannot do in time."""

from __future__ import annotations

import time

PER_SECOND = 4e8
"""Sums compared in a second of a time limit; machines of 2024 do twice as many."""
CALLS = 5000
"""Sums that could be compared in the time that it takes to begin with an edge or a node."""


class Budget:
    """What is left of a time limit; without one it never ends."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._left = float("inf") if seconds is None else seconds * PER_SECOND
        self.spent = 0.0

    @property
    def left(self) -> float:
        """Sums that may still be compared; 0 when the time is over."""
        if self._end is not None and time.monotonic() > self._end:
            return 0.0
        return max(0.0, self._left - self.spent)

    def spend(self, sums: float) -> None:
        """So many sums are compared."""
        self.spent += sums
