"""How much a search may do: counted, so that equal requests give equal answers; the clock only ends what a slow machine
cannot do in time."""

from __future__ import annotations

import time

PER_SECOND = 4e8
"""Sums compared in a second of a time limit; machines of 2024 do twice as many."""
CALLS = 5000
"""Sums that could be compared in the time that it takes to begin with an edge or a node."""
PATIENCE_S = 60.0
"""Of work, where no time limit is given; the clock is not looked at then."""


class Budget:
    """Rest of a time limit."""

    def __init__(self, seconds: float | None, patience: float = PATIENCE_S) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._work = (patience if seconds is None else seconds) * PER_SECOND
        self._whole: Budget | None = None
        self._spent = 0.0

    @property
    def left(self) -> float:
        """Sums that may still be compared; 0 when the time is over."""
        if self._end is not None and time.monotonic() > self._end:
            return 0.0
        return max(0.0, self._work - self._spent)

    def spend(self, sums: float) -> None:
        """So many sums are compared."""
        self._spent += sums
        if self._whole is not None:
            self._whole.spend(sums)

    def share(self, part: float) -> Budget:
        """A part of what is left, spent from this as well."""
        budget = Budget(None)
        budget._end = self._end
        budget._work = part * self.left
        budget._whole = self
        return budget
