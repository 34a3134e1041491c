"""The levels of the search for splits inside a stage, by name."""

from __future__ import annotations

from typing import Literal

from autopipe.passes.spmd.search.exact import Exact
from autopipe.passes.spmd.search.fitting import Solver

LevelName = Literal["O2", "O3", "O4"]


def solver_of(level: LevelName, time_limit: float | None) -> Solver:
    """The solver of a level, whose searches together take at most so many seconds from now on."""
    return Exact(time_limit)
