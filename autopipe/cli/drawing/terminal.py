"""Timelines and memory over time as text: a row a device; several steps on one scale."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.style import Style
from rich.text import Text

from autopipe.cli.drawing.picture import (
    Bar,
    Curve,
    Picture,
    SteadyState,
    TimeAxis,
    TimeWindow,
    row_margin,
    stage_colour,
    text_colour,
    time_axis,
    timeline_rows,
)
from autopipe.ir.schedule import Phase

_FILL = {Phase.FORWARD: "-", Phase.BACKWARD: "=", Phase.INPUT_GRADIENT: "+", Phase.WEIGHT_GRADIENT: "~"}


def draw_timeline(picture: Picture, width: int, colour: bool) -> Iterator[Text]:
    """Lines of at most `width` characters: the devices' tasks, the repetend's bracket, the scale.

    A task is its name as far as it fits, filled with `-` (forward), `=` (backward), `+` or `~` (input or weight
    gradient); with `colour` on its stage's colour. Where the step does not fit, warm-up, some repetitions and cool-down
    are shown, and a last line says what is left out.
    """
    margin = row_margin(picture)
    axis = time_axis(picture, max(20, width - margin))
    rows = picture.rows
    for device, label in timeline_rows(picture):
        yield Text(label) if device is None else task_row(label, rows[device], axis, colour)
    if picture.steady is not None:
        yield Text(" " * margin + _bracket(picture.steady, axis))
    yield Text(" " * margin + _scale(picture, axis))
    for line in _left_out(picture, axis):
        yield from (Text(" " * margin + part) for part in wrap(line, width - margin))


def task_row(label: str, bars: list[Bar], axis: TimeAxis, colour: bool) -> Text:
    """A device's tasks, in order of time, behind its label."""
    row = Text(label)
    # F3 and f3 are two stages that their letters tell apart; of two stages with one letter, names say which.
    stages = Counter(is_upper for _, is_upper in {(bar.stage, bar.letter.isupper()) for bar in bars})
    ends = [bar.end for bar in bars]
    position = 0
    for window in axis.windows:
        if window.column > position:
            row.append("⋯".center(window.column - position))
            position = window.column
        for bar in bars[bisect_right(ends, window.start) :]:
            if bar.start >= window.end:
                break
            start, end = max(position, window.column_of(bar.start)), window.column_of(bar.end)
            if end > start:
                row.append(" " * (start - position))
                row.append(_cell(bar, end - start, stages[bar.letter.isupper()] > 1), _style(bar) if colour else "")
                position = end
        row.append(" " * (window.column + window.columns - position))
        position = window.column + window.columns
    return row


def _cell(bar: Bar, width: int, several: bool) -> str:
    # 2F0 needs a column behind it: 2F01F0 cannot be told apart.
    full = bar.name if width > len(bar.name) or not bar.name[0].isdigit() else bar.label
    names = (full, bar.label, bar.letter) if several else (bar.label, bar.letter)
    name = next((each for each in names if len(each) <= width), "")
    # A block may be called anything; what is no letter of one column would break the row, or worse.
    shown = "".join(letter if letter == "·" or " " < letter <= "~" else "?" for letter in name)
    return shown + _FILL[bar.phase] * (width - len(shown))


def _style(bar: Bar) -> Style:
    return Style(color=text_colour(bar.phase), bgcolor=stage_colour(bar.stage, bar.phase))


def _bracket(state: SteadyState, axis: TimeAxis) -> str:
    """The repetend, with a mark where each repetition begins where there is room for marks."""
    window = next((each for each in axis.windows if each.overlaps(state.start, state.end)), axis.windows[0])
    start = window.column_of(state.start)
    inside = max(0, window.column_of(state.end) - start - 2)
    line = ["─"] * inside
    shown = state.count
    if state.period is not None:
        shown = min(state.count, round((window.end - state.start) / state.period))
        for tick in _ticks(state, state.period, window) if inside >= 4 * shown else ():
            if 0 <= tick - start - 1 < inside:
                line[tick - start - 1] = "┴"
    texts = (f" repetend ×{state.count}, {shown} shown ", f" repetend ×{state.count} ", f"×{state.count}")
    label = next((each for each in texts[shown == state.count :] if len(each) <= inside), "")
    if label:
        first = (inside - len(label)) // 2
        line[first : first + len(label)] = label
    cut = state.period is None and state.end > window.end
    return " " * start + "└" + "".join(line) + ("─" if cut else "┘")


def _ticks(state: SteadyState, period: float, window: TimeWindow) -> Iterator[int]:
    """Columns at which repetitions after the first begin."""
    for index in range(1, state.count):
        time = state.start + index * period
        if time >= window.end:
            return
        yield window.column_of(time)


def _scale(picture: Picture, axis: TimeAxis) -> str:
    line = [" "] * axis.columns
    end = picture.time_text(picture.end)
    line[len(line) - len(end) :] = end
    taken = len(line) - len(end) - 1
    for window in axis.windows:
        text = picture.time_text(window.start) if window.start else "0"
        if window.column + len(text) <= taken:
            line[window.column : window.column + len(text)] = text
    return "".join(line)


def _left_out(picture: Picture, axis: TimeAxis) -> Iterator[str]:
    """The gaps in words."""
    parts = [part for start, end in axis.hidden() for part in _parts(picture, start, end)]
    if parts:
        yield f"⋯ left out: {', '.join(parts)}"


def _parts(picture: Picture, start: float, end: float) -> Iterator[str]:
    state = picture.steady
    if state is None or state.period is None:
        yield picture.time_text(end - start)
        return
    least = 0.05 * state.period
    if state.start - start > least:
        yield f"{picture.time_text(min(end, state.start) - start)} of warm-up"
    repetitions = round((min(end, state.end) - max(start, state.start)) / state.period)
    if repetitions > 0:
        yield f"{repetitions} repetition{'s' if repetitions > 1 else ''} of {picture.time_text(state.period)}"
    if end - state.end > least:
        yield f"{picture.time_text(end - max(start, state.end))} of cool-down"


_BARS = "▁▂▃▄▅▆▇█"
_LEAST_COLUMNS = 10
"""In fewer than these no limits are told beside the peaks."""
_NEAR = 2
"""A limit within this many times the highest peak is what a full bar stands for."""


def draw_memory(picture: Picture, width: int, colour: bool) -> Iterator[Text]:
    """A heading, then a line a device: its memory over the whole step, its peak and its limit.

    A full bar is the largest limit where that is near, otherwise the highest peak of all devices. A peak above the
    device's limit is told in words.
    """
    margin = row_margin(picture)
    peaks = picture.peaks
    highest = max(peaks, default=0)
    limit = max((each for each in picture.limits if each is not None), default=0)
    full = limit if highest <= limit <= _NEAR * highest else highest
    yield Text(f"memory (a full bar is {picture.memory_text(full)}{', the limit' if full == limit else ''})"[:width])
    labels = [_label(picture, peak, limit) for peak, limit in zip(peaks, picture.limits, strict=True)]
    if width - margin - max(map(len, labels), default=0) < _LEAST_COLUMNS:
        labels = [f" {picture.memory_text(peak)}" for peak in peaks]
    columns = max(4, width - margin - max(map(len, labels), default=0))
    for device, start in timeline_rows(picture):
        if device is None:
            yield Text(start)
            continue
        bars = "".join(bar_of(used, full) for used in highest_of(picture.memory[device], picture.end, columns))
        over = " over " in labels[device]
        yield Text.assemble(start, (bars, "cyan" if colour else ""), (labels[device], "red" if over and colour else ""))


def _label(picture: Picture, peak: int, limit: int | None) -> str:
    text = f" {picture.memory_text(peak)}"
    if limit is None:
        return text
    return f"{text} {'of' if peak <= limit else 'over'} {picture.memory_text(limit)}"


def highest_of(curve: Curve, end: float, columns: int) -> list[int]:
    """The most memory in use in each of `columns` equal parts of the step."""
    highest = [0] * columns
    for (start, used), stop in zip(curve, [*(time for time, _ in curve[1:]), end], strict=True):
        first = min(columns - 1, int(start / end * columns)) if end else 0
        last = min(columns - 1, int(stop / end * columns)) if end else columns - 1
        for column in range(first, last + 1):
            highest[column] = max(highest[column], used)
    return highest


def bar_of(used: int, full: int) -> str:
    """A character that is as high as `used` is of `full`."""
    return _BARS[min(len(_BARS) - 1, int(used / full * len(_BARS)))] if full and used >= 0 else _BARS[0]


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
