"""The levels of the search for splits inside a stage, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from autopipe.passes.placement.tepdist.level import Level
from autopipe.passes.placement.tepdist.level_o2 import O2
from autopipe.passes.placement.tepdist.level_o3 import O3
from autopipe.passes.placement.tepdist.level_o4 import O4

LevelName = Literal["O2", "O3", "O4"]

_SOLVERS: Final[Mapping[LevelName, Callable[[float | None], Level]]] = {"O2": O2, "O3": O3, "O4": O4}


def solver_of(level: LevelName, time_limit: float | None) -> Level:
    """The solver of a level, whose searches together take at most `time_limit` seconds from now on."""
    return _SOLVERS[level](time_limit)
