"""What a benchmark gives: one figure of a paper beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopipe.cli.drawing.picture import Picture


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `theirs` is what the paper states, None where it states no number; `ours` is made in this run."""

    case: str
    metric: str
    theirs: float | None
    ours: float | None
    """None where there is no answer: `note` says why."""
    unit: str = ""
    variant: str = ""
    """Which schedule, strategy or setting the figure is for, where a case has several."""
    note: str = ""
    """How ours came about (measured, simulated, on what), or why there is none."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a benchmark computes of one shape or model at one number of devices, for one table or figure."""

    name: str
    """`m/4`, `gpt-11b/p=4`: what its rows are under; several cases may have one name."""
    part: str
    """The table or figure, for the progress bar."""
    run: Callable[[], Iterable[Row]]
    pictures: Callable[[], Iterable[Picture]] = tuple
    """What is drawn below the table."""
