"""Budget and callbacks of a search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autopipe.passes.solvers.cp_sat import Limit

Progress = Callable[[int | None, int, float], None]
"""Called with the best value so far (None before the first), its lower bound and the seconds used."""

WORK_PER_SECOND = 0.35
"""CP-SAT's deterministic time that a second of the limit stands for: one worker does more than this in a second, so
that the work runs out before the clock does and the answer depends on the seed alone."""

_USABLE = 0.95
"""Share of the seconds that is searched; the rest is for completing and checking what was found."""
_BETWEEN_REPORTS_S = 0.1
"""Seconds between two calls of `progress`."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search."""

    time_limit: float = 10.0
    """Seconds in all.

    The solver's work is limited in its own deterministic time, for which the seconds stand: the same input and seed
    give the same answer wherever that ends before the clock. On machines slower than that the clock ends it.
    """
    seed: int = 0
    progress: Progress | None = None
    """Told of better values and bounds, at most ten times a second."""
    patience: float = 1.0
    """How many times its seconds a search may take where a busy machine needs them for the same work, and so for the
    same answer."""
    unrolled: int | None = None
    """Most blocks of a device that a program should write out: schedules with more of them repeat from there on. None
    for two units a device, or a schedule of 2000 blocks in all."""


@dataclass(slots=True)
class Budget:
    """Rest of a search's budget."""

    options: SearchOptions
    start: float = field(default_factory=time.perf_counter)
    work: float = 0.0
    """Deterministic time spent so far."""
    reported: float = float("-inf")

    @property
    def used(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.start

    @property
    def over(self) -> bool:
        """True if the seconds are used up but for what it takes to finish."""
        return self.used > self._usable

    def limit(self, share: float) -> Limit:
        """A limit of a share of the work that is left, and of all seconds that are."""
        work = self.options.time_limit * WORK_PER_SECOND - self.work
        return Limit(self._usable - self.used, work * share, self.options.seed)

    @property
    def _usable(self) -> float:
        return _USABLE * self.options.time_limit * self.options.patience

    def spend(self, work: float) -> None:
        """Count work that was done."""
        self.work += work

    def report(self, value: int | None, bound: int) -> None:
        """Tell whoever wants to know."""
        if self.options.progress and self.used >= self.reported + _BETWEEN_REPORTS_S:
            self.reported = self.used
            self.options.progress(value, bound, self.used)
