"""What a search may spend, and whom it tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autopipe.passes.solvers.cp_sat import Limit

Progress = Callable[[int | None, int, float], None]
"""Called with the best value so far (None before the first), its lower bound and the seconds used."""

WORK_PER_SECOND = 0.5
"""Deterministic time that CP-SAT spends in a second of a slow machine, one worker. Budgets are counted in it, so that a
faster machine gives the same answer sooner; a slower one is stopped by the clock."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search."""

    time_limit: float = 10.0
    """Seconds in all."""
    seed: int = 0
    whole_limit: int = 400
    """Most blocks of all units together for which the whole schedule is also solved directly."""
    progress: Progress | None = None


@dataclass(slots=True)
class Budget:
    """What is left of a search's time."""

    options: SearchOptions
    start: float = field(default_factory=time.perf_counter)
    work: float = 0.0
    """Deterministic time spent so far."""

    @property
    def used(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.start

    @property
    def work_left(self) -> float:
        """Deterministic time that is left."""
        return self.options.time_limit * WORK_PER_SECOND - self.work

    def limit(self, share: float) -> Limit:
        """A limit of a share of what is left."""
        seconds = self.options.time_limit - self.used
        return Limit(seconds, self.work_left * share, self.options.seed)
