"""Time on a row of characters, with the middle left out where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.timeline import Timeline

_LEAST_WIDTH = 3
"""Columns that the shortest kind of task should have."""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Seconds to columns. Between `head_end` and `tail_start` nothing is shown, but one column for the gap."""

    columns: int
    scale: float
    """Columns a second."""
    end: float
    head_columns: int
    """Columns from the start; `columns` where all is shown."""

    @property
    def whole(self) -> bool:
        """Whether all of the step is shown."""
        return self.head_columns == self.columns

    @property
    def tail_start(self) -> float:
        """Seconds at which the part after the gap begins."""
        return self.end - (self.columns - self.head_columns - 1) / self.scale

    def column(self, seconds: float) -> int:
        """The column of an instant; the gap's for one that is left out."""
        found = round(seconds * self.scale)
        if self.whole or found <= self.head_columns:
            return min(found, self.columns)
        return max(self.head_columns + 1, self.columns - round((self.end - seconds) * self.scale))

    def hidden(self, start: float, end: float) -> bool:
        """Whether a span lies in what is left out, or reaches into it."""
        return not self.whole and round(end * self.scale) > self.head_columns and start < self.tail_start


def time_axis(timeline: Timeline, columns: int) -> TimeAxis:
    """An axis of `columns` characters on which the shortest kind of task can be read."""
    end = timeline.end or 1.0
    lengths: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        lengths.setdefault((span.task.stage, span.task.phase.value), span.end - span.start)
    typical = sorted(lengths.values())[len(lengths) // 4] if lengths else end
    scale = columns / end
    if typical <= 0 or typical * scale >= _LEAST_WIDTH:
        return TimeAxis(columns, scale, end, columns)
    return TimeAxis(columns, min(_LEAST_WIDTH / typical, 40 * scale), end, columns * 3 // 5)
