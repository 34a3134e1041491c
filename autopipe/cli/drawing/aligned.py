"""Several steps as text on one scale: where one ends and another goes on, all can see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from autopipe.cli.drawing.axis import TimeAxis, TimeWindow
from autopipe.cli.drawing.picture import Bar, Picture
from autopipe.cli.drawing.sparkline import bar_of, highest_of
from autopipe.cli.drawing.terminal import task_row

_MOST_ROWS = 32
"""Rows of one step."""
_LEAST_WIDTH = 2
"""Columns that tasks take in the middle; where they take fewer, how busy a device is is drawn instead."""

Named = tuple[str, Picture]


def draw_timelines(steps: Sequence[Named], width: int, colour: bool) -> Iterator[Text]:
    """The steps' timelines on one axis of time, each with its length where it ends.

    Tasks are drawn where all of them are wide enough; of finer ones each column is as high as its device is busy.
    """
    end, margin, columns = _space(steps, width)
    axis = TimeAxis((TimeWindow(0.0, end, 0, columns),), columns)
    lengths = sorted(bar.end - bar.start for _, picture in steps for bar in picture.bars)
    as_tasks = not lengths or lengths[len(lengths) // 2] * columns >= _LEAST_WIDTH * end
    yield Text("timelines on one scale" + ("" if as_tasks else " (a full bar is a busy device)"))
    for name, picture in steps:
        yield from _heading(name, picture, axis, margin)
        rows = picture.rows
        for device, label in _rows(picture, margin):
            if device is None:
                yield Text(label)
            elif as_tasks:
                yield task_row(label, rows[device], axis, colour)
            else:
                yield Text.assemble(label, (_busy(rows[device], picture.end, axis), "cyan" if colour else ""))


def draw_memories(steps: Sequence[Named], width: int, colour: bool) -> Iterator[Text]:
    """Each device's memory over time on the same axis, all of one height, with its peak behind it."""
    peaks = {picture.memory_text(peak) for _, picture in steps for peak in picture.peaks}
    end, margin, columns = _space(steps, width - 1 - max(map(len, peaks), default=0))
    full = max((peak for _, picture in steps for peak in picture.peaks), default=0)
    yield Text(f"memory on one scale (a full bar is {steps[0][1].memory_text(full)})")
    axis = TimeAxis((TimeWindow(0.0, end, 0, columns),), columns)
    for name, picture in steps:
        yield from _heading(name, picture, axis, margin)
        own = max(1, axis.column_of(picture.end))
        for device, label in _rows(picture, margin):
            if device is None:
                yield Text(label)
                continue
            bars = "".join(bar_of(used, full) for used in highest_of(picture.memory[device], picture.end, own))
            peak = f" {picture.memory_text(picture.peaks[device])}"
            yield Text.assemble(label, (bars, "cyan" if colour else ""), " " * (columns - own), peak)


def _space(steps: Sequence[Named], width: int) -> tuple[float, int, int]:
    """The end of the longest step, the characters before a row and those of the row."""
    margin = max(len(str(picture.device_of(len(picture.memory) - 1))) for _, picture in steps) + 1
    return max(picture.end for _, picture in steps) or 1.0, margin, max(20, width - margin)


def _heading(name: str, picture: Picture, axis: TimeAxis, margin: int) -> Iterator[Text]:
    """The step's name, and its length as far to the right as it ends, on a line of its own where both do not fit."""
    length = picture.time_text(picture.end) + " ▏"
    stop = margin + axis.column_of(picture.end) + 1
    if len(name) + len(length) + 1 <= stop:
        yield Text(name + length.rjust(stop - len(name)))
    else:
        yield Text(f"{name}: {picture.time_text(picture.end)}")


def _rows(picture: Picture, margin: int) -> Iterator[tuple[int | None, str]]:
    """The rows that are drawn, with their labels; None for a line that says what is not."""
    count = len(picture.memory)
    for row in range(min(count, _MOST_ROWS)):
        yield row, f"{picture.device_of(row)} ".rjust(margin)
    notes = ["others do what one of these does"] if picture.devices else []
    notes += [f"{count - _MOST_ROWS} more"] if count > _MOST_ROWS else []
    if notes:
        yield None, " " * margin + ", ".join(notes)


def _busy(bars: Sequence[Bar], end: float, axis: TimeAxis) -> str:
    """The share of each column in which a device runs tasks, as bars, up to the end of its step."""
    columns = max(1, axis.column_of(end))
    size = end / columns
    filled = [0.0] * columns
    for bar in bars:
        for column in range(int(bar.start / size), min(columns, int(bar.end / size) + 1)):
            filled[column] += max(0.0, min(bar.end, (column + 1) * size) - max(bar.start, column * size))
    return "".join(bar_of(round(1000 * min(1.0, each / size)), 1000) if each else " " for each in filled)
