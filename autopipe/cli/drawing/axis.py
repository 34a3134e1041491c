"""Time on a row of characters, cut to warm-up, some repetitions and cool-down where it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.cli.drawing.picture import Picture
from autopipe.cli.drawing.steady import SteadyState

_LEAST_WIDTH = 3
"""Columns that the shortest kind of task should have."""
_GAP = 3
"""Columns that stand for time left out."""
_REPETEND_SHARE = 6
"""Least share of the row, as one part in N, for repetitions, however long warm-up and cool-down are."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A stretch of time that is shown, and the columns it takes."""

    start: float
    end: float
    column: int
    columns: int

    def column_of(self, time: float) -> int:
        """The column of an instant; the nearest edge's for one outside."""
        share = (time - self.start) / (self.end - self.start)
        return self.column + min(self.columns, max(0, round(share * self.columns)))

    def overlaps(self, start: float, end: float) -> bool:
        """True if a part of the interval is shown in this window."""
        return start < self.end and end > self.start


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Times to columns, through one window or several with `_GAP` columns between them."""

    windows: tuple[TimeWindow, ...]
    columns: int

    @property
    def whole(self) -> bool:
        """True if all of the step is shown."""
        return len(self.windows) == 1

    def hidden(self) -> Iterator[tuple[float, float]]:
        """The stretches of time that are left out."""
        for before, after in zip(self.windows, self.windows[1:], strict=False):
            yield before.end, after.start

    def column_of(self, time: float) -> int:
        """The column of an instant; the last one before the gap for one that is left out."""
        return max((window.column_of(time) for window in self.windows if window.start <= time), default=0)


def time_axis(picture: Picture, columns: int) -> TimeAxis:
    """An axis of `columns` characters on which the shortest kind of task can be read."""
    end = picture.end or 1.0
    lengths: dict[tuple[int, str], float] = {}
    for bar in picture.bars:
        lengths.setdefault((bar.stage, bar.phase.value), bar.end - bar.start)
    typical = sorted(lengths.values())[len(lengths) // 4] if lengths else end
    if typical <= 0 or typical * columns / end >= _LEAST_WIDTH:
        return TimeAxis((TimeWindow(0.0, end, 0, columns),), columns)
    state = picture.steady
    if state is None or state.period is None:
        scale = min(_LEAST_WIDTH / typical, 40 * columns / end)
        head = columns * 3 // 5
        return _axis([(0.0, head), (end - (columns - head - _GAP) / scale, columns - head - _GAP)], scale, columns)
    # One repetition takes at most half of the row, however fine its tasks are.
    scale = min(_LEAST_WIDTH / typical, columns // 2 / state.period)
    if scale * end <= columns:
        return TimeAxis((TimeWindow(0.0, end, 0, columns),), columns)
    return _cut(state, end, scale, columns, 0 if picture.physical else scale)


def _cut(state: SteadyState, end: float, scale: float, columns: int, unit: float) -> TimeAxis:
    """Warm-up from its start, as many repetitions as there is room for, and cool-down to its end.

    `unit` is what the columns of a part are a multiple of, for times that are whole numbers; 0 for any.
    """
    assert state.period is not None
    width = state.period * scale
    least = min(state.count, max(1, int(columns / _REPETEND_SHARE / width)))
    room = columns - 2 * _GAP - math.ceil(least * width)
    warm_up, cool_down = math.ceil(state.start * scale), math.ceil((end - state.end) * scale)
    head = _whole(min(warm_up, max(room // 2, room - cool_down)), unit)
    tail = _whole(min(cool_down, room - head), unit)
    count = min(state.count, least + int((room - head - tail) / width))
    body = round(count * width)
    pieces = [(0.0, head), (state.start, body), (end - tail / scale, tail)]
    if head == warm_up:  # nothing is left out before the repetitions
        pieces[:2] = [(0.0, round(state.start * scale) + body)]
    if count == state.count and tail == cool_down:
        last = pieces.pop()
        pieces[-1] = (pieces[-1][0], pieces[-1][1] + last[1])
    return _axis([piece for piece in pieces if piece[1] > 0], scale, columns)


def _whole(columns: int, unit: float) -> int:
    """Columns for a whole number of units, at most `columns`."""
    return round(int(columns / unit) * unit) if unit else columns


def _axis(pieces: list[tuple[float, int]], scale: float, columns: int) -> TimeAxis:
    """Windows from (start, columns), one after the other; the last one ends the row."""
    windows, column = [], 0
    for index, (start, width) in enumerate(pieces):
        if index == len(pieces) - 1:
            width = max(1, columns - column) if len(pieces) == 1 else width
            column = columns - width
        windows.append(TimeWindow(start, start + width / scale, column, width))
        column += width + _GAP
    return TimeAxis(tuple(windows), columns)
