"""Timelines and memory over time as text: a row a device, of one step or of several on one
scale.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap

from rich.style import Style
from rich.text import Text

from autopipe.cli.drawing.timeline_figure import (
    END_STYLES,
    PHASE_NAMES,
    Bar,
    Curve,
    Picture,
    SteadyState,
    legend_of,
    stage_colour,
    text_colour,
)
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import EndKind, EndSpan
from autopipe.ir.words import plural

_LEAST_TASK = 3
"""Columns that the shortest kind of task should have."""
_GAP = 3
"""Columns that stand for time left out."""
_REPETEND_SHARE = 6
"""Least share of the row, as one part in N, for repetitions, however long warm-up and cool-down
are.
"""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A stretch of time that is drawn, and the columns it takes."""

    start: float
    end: float
    column: int
    columns: int

    def column_of(self, time: float) -> int:
        """The column of an instant; the nearest edge's for one outside."""
        share = (time - self.start) / (self.end - self.start)
        return self.column + min(self.columns, max(0, round(share * self.columns)))


Axis = tuple[TimeWindow, ...]
"""Times to columns, through one window or several with `_GAP` columns between them."""


def _time_axis(picture: Picture, columns: int) -> Axis:
    """An axis of `columns` characters on which the shortest kind of task can be read."""
    end = picture.end or 1.0
    whole = (TimeWindow(0.0, end, 0, columns),)
    lengths: dict[tuple[int, Phase], float] = {}
    for bar in picture.bars:
        lengths.setdefault((bar.stage, bar.phase), bar.end - bar.start)
    typical = sorted(lengths.values())[len(lengths) // 4] if lengths else end
    if typical <= 0 or typical * columns / end >= _LEAST_TASK:
        return whole
    state = picture.steady
    if state is None or state.period is None:
        scale = min(_LEAST_TASK / typical, 40 * columns / end)
        head = columns * 3 // 5
        tail = columns - head - _GAP
        return _axis([(0.0, head), (end - tail / scale, tail)], scale, columns)
    # One repetition takes at most half of the row, however fine its tasks are.
    scale = min(_LEAST_TASK / typical, columns // 2 / state.period)
    if scale * end <= columns:
        return whole
    return _cut(state, state.period * scale, end, scale, columns, 0 if picture.physical else scale)


def _cut(
    state: SteadyState, width: float, end: float, scale: float, columns: int, unit: float
) -> Axis:
    """Warm-up from its start, as many repetitions of `width` as there is room for, and cool-down to
    its end. `unit` is what the columns of a part are a multiple of, for times that are whole
    numbers; 0 for any.
    """
    least = min(state.count, max(1, int(columns / _REPETEND_SHARE / width)))
    room = columns - 2 * _GAP - math.ceil(least * width)
    warm_up = math.ceil(state.start * scale)
    cool_down = math.ceil((end - state.end) * scale)
    head = _whole_units(min(warm_up, max(room // 2, room - cool_down)), unit)
    tail = _whole_units(min(cool_down, room - head), unit)
    count = min(state.count, least + int((room - head - tail) / width))
    body = round(count * width)
    pieces = [(0.0, head), (state.start, body), (end - tail / scale, tail)]
    if head == warm_up:  # nothing is left out before the repetitions
        pieces[:2] = [(0.0, round(state.start * scale) + body)]
    if count == state.count and tail == cool_down:
        pieces[-2:] = [(pieces[-2][0], pieces[-2][1] + tail)]
    return _axis([piece for piece in pieces if piece[1] > 0], scale, columns)


def _whole_units(columns: int, unit: float) -> int:
    return round(int(columns / unit) * unit) if unit else columns


def _axis(pieces: list[tuple[float, int]], scale: float, columns: int) -> Axis:
    """Windows from (start, columns), one after the other; the last one ends the row."""
    windows = []
    column = 0
    for index, (start, width) in enumerate(pieces):
        if index == len(pieces) - 1:
            width = max(1, columns) if index == 0 else width
            column = columns - width
        windows.append(TimeWindow(start, start + width / scale, column, width))
        column += width + _GAP
    return tuple(windows)


_END_FILL = {EndKind.GRADIENT_SUM: ":", EndKind.UPDATE: "#"}
_FILL = {
    Phase.FORWARD: "-",
    Phase.BACKWARD: "=",
    Phase.INPUT_GRADIENT: "+",
    Phase.WEIGHT_GRADIENT: "~",
}


def draw_timeline(picture: Picture, width: int, colour: bool) -> Iterator[Text]:
    """Lines of at most `width` characters: the devices' tasks, the repetend's bracket, the scale.

    A task is its name as far as it fits, filled with `-` (forward), `=` (backward), `+` or `~`
    (input or weight gradient); with `colour` on its stage's colour. On a device of several stages
    it is its phase's letter, or without colour its stage's number, and a key stands below. A key
    also tells gradient sums (`G:`) and updates (`U#`), which take at least a column. Where the step
    does not fit, warm-up, some repetitions and cool-down are drawn, and a last line says what is
    left out.
    """
    margin = len(str(len(picture.memory) - 1)) + 1
    columns = max(20, width - margin)
    axis = _time_axis(picture, columns)
    rows = picture.rows
    ends = picture.end_rows
    for device, label in _middle_left_out(picture, margin):
        yield (
            Text(label)
            if device is None
            else _task_row(label, rows[device], ends[device], axis, colour)
        )
    if picture.steady is not None:
        yield Text(" " * margin + _bracket(picture.steady, axis))
    yield Text(" " * margin + _scale(picture, axis, columns))
    if picture.ends or _has_numbered_stages(picture):
        yield from _key([picture], colour, width - margin, margin)
    hidden = [
        part for one, other in pairwise(axis) for part in _hidden(picture, one.end, other.start)
    ]
    if hidden:
        for line in wrap(f"⋯ left out: {', '.join(hidden)}", width - margin):
            yield Text(" " * margin + line)


_MOST_DEVICES = 64


def _middle_left_out(picture: Picture, margin: int) -> Iterator[tuple[int | None, str]]:
    """Devices with the label of their row; None for the row that stands for those left out in the
    middle.
    """
    count = len(picture.memory)
    half = _MOST_DEVICES // 2
    for device in range(count):
        if count <= _MOST_DEVICES or device < half or device >= count - half:
            yield device, f"{device:{margin - 1}} "
        elif device == half:
            yield (
                None,
                f"{'⋯':>{margin - 1}} {count - 2 * half} more {plural(count - 2 * half, 'device')}",
            )


def _task_row(label: str, bars: list[Bar], ends: list[EndSpan], axis: Axis, colour: bool) -> Text:
    row = Text(label)
    several = _letters_repeat(bars)
    stops = [bar.end for bar in bars]
    position = 0
    for window in axis:
        if window.column > position:
            row.append("⋯".center(window.column - position))
            position = window.column
        closing = _end_columns(ends, window)
        room = closing[0][1] if closing else window.column + window.columns
        for bar in bars[bisect_right(stops, window.start) :]:
            if bar.start >= window.end:
                break
            start = max(position, window.column_of(bar.start))
            end = min(room, window.column_of(bar.end))
            if end > start:
                row.append(" " * (start - position))
                style = Style(
                    color=text_colour(bar.phase), bgcolor=stage_colour(bar.stage, bar.phase)
                )
                row.append(
                    _cell(bar, end - start, _names(bar, several, colour)), style if colour else ""
                )
                position = end
        for kind, start, end in closing:
            if end > max(position, start):
                start = max(position, start)
                row.append(" " * (start - position))
                own = END_STYLES[kind]
                text = own.letter + _END_FILL[kind] * (end - start - 1)
                row.append(text, Style(color=own.ink, bgcolor=own.fill) if colour else "")
                position = end
        row.append(" " * (window.column + window.columns - position))
        position = window.column + window.columns
    return row


def _end_columns(ends: list[EndSpan], window: TimeWindow) -> list[tuple[EndKind, int, int]]:
    """Return the columns from which and up to which gradient sums and the update of a device are
    drawn in a window.

    Each takes at least one. If there is no room at the window's end, they move to the left, over
    the last task.
    """
    found: list[tuple[EndKind, int, int]] = []
    position = window.column
    for span in ends:
        if span.end > window.start and span.start < window.end:
            start = max(position, window.column_of(span.start))
            position = max(start + 1, window.column_of(span.end))
            found.append((span.kind, start, position))
    too_far = max(0, position - window.column - window.columns)
    return [(kind, start - too_far, end - too_far) for kind, start, end in found]


def _has_numbered_stages(picture: Picture) -> bool:
    """Return True if a device has several stages that names of tasks tell apart by number."""
    return any(_letters_repeat(bars) and bars[0].name[:1].isdigit() for bars in picture.rows)


def _letters_repeat(bars: list[Bar]) -> bool:
    """True if a device has several stages whose tasks have the same letters: F3 and f3 tell two
    stages apart.
    """
    stages = Counter(
        is_upper for _, is_upper in {(bar.stage, bar.letter.isupper()) for bar in bars}
    )
    return any(count > 1 for count in stages.values())


def _names(bar: Bar, several: bool, colour: bool) -> tuple[str, ...]:
    if not several:
        return bar.label, bar.letter
    if not bar.name[:1].isdigit():  # Blocks that somebody gave names to.
        return bar.name, bar.label, bar.letter
    return (bar.letter,) if colour else (str(bar.stage),)


def _cell(bar: Bar, width: int, names: tuple[str, ...]) -> str:
    """The first of the names that fits, filled as the phase is."""
    name = next((each for each in names if len(each) <= width), "")
    # A block may be called anything; what is no letter of one column would break the row, or worse.
    told = "".join(letter if letter == "·" or " " < letter <= "~" else "?" for letter in name)
    return told + _FILL[bar.phase] * (width - len(told))


def _key(pictures: Sequence[Picture], colour: bool, width: int, margin: int) -> Iterator[Text]:
    """The letters and fills of phases and of the work at the step's end, and with `colour` the
    stages on theirs.
    """
    legend = legend_of(pictures)
    numbered = not colour and any(map(_has_numbered_stages, pictures))
    told = [
        f"{'' if numbered else letter}{_FILL[phase]} {PHASE_NAMES[phase]}"
        for letter, phase in legend.phases
    ]
    told += [f"{END_STYLES[kind].letter}{_END_FILL[kind]} {kind.value}" for kind in legend.ends]
    for line in wrap(
        ("a task is its stage's number; " if numbered else "") + ", ".join(told), width
    ):
        yield Text(" " * margin + line)
    if colour:
        row = Text(" " * margin + "stages")
        for stage in legend.stages:
            name = f" {stage} "
            if row.cell_len + 1 + len(name) > margin + width:
                yield row
                row = Text(" " * (margin + len("stages")))
            style = Style(
                color=text_colour(Phase.FORWARD), bgcolor=stage_colour(stage, Phase.FORWARD)
            )
            row.append(" ").append(name, style)
        yield row


def _bracket(state: SteadyState, axis: Axis) -> str:
    """The repetend, with a mark where each repetition begins where there is room for marks."""
    window = next(
        (each for each in axis if state.start < each.end and state.end > each.start), axis[0]
    )
    start = window.column_of(state.start)
    inside = max(0, window.column_of(state.end) - start - 2)
    line = ["─"] * inside
    drawn = state.count
    if state.period is not None:
        drawn = min(state.count, round((window.end - state.start) / state.period))
        begins = [state.start + index * state.period for index in range(1, state.count)]
        for column in [window.column_of(each) - start - 1 for each in begins if each < window.end]:
            if inside >= 4 * drawn and 0 <= column < inside:
                line[column] = "┴"
    texts = (
        f" steady state ×{state.count}, {drawn} shown ",
        f" steady state ×{state.count} ",
        f"×{state.count}",
    )
    label = next((each for each in texts[drawn == state.count :] if len(each) <= inside), "")
    if label:
        first = (inside - len(label)) // 2
        line[first : first + len(label)] = label
    cut = state.period is None and state.end > window.end
    return " " * start + "└" + "".join(line) + ("─" if cut else "┘")


def _scale(picture: Picture, axis: Axis, columns: int) -> str:
    line = [" "] * columns
    end = picture.time_text(picture.end)
    line[columns - len(end) :] = end
    for window in axis:
        text = picture.time_text(window.start) if window.start else "0"
        if window.column + len(text) < columns - len(end):
            line[window.column : window.column + len(text)] = text
    return "".join(line)


def _hidden(picture: Picture, start: float, end: float) -> Iterator[str]:
    state = picture.steady
    if state is None or state.period is None:
        yield picture.time_text(end - start)
        return
    least = 0.05 * state.period
    if state.start - start > least:
        yield f"{picture.time_text(min(end, state.start) - start)} of warm-up"
    repetitions = round((min(end, state.end) - max(start, state.start)) / state.period)
    if repetitions > 0:
        yield (
            f"{repetitions} {plural(repetitions, 'repetition')} of "
            f"{picture.time_text(state.period)}"
        )
    if end - state.end > least:
        yield f"{picture.time_text(end - max(start, state.end))} of cool-down"


_BARS = "▁▂▃▄▅▆▇█"
_LEAST_COLUMNS = 10
"""In fewer than these no limits are told beside the peaks."""
_NEAR = 2
"""A limit within this many times the highest peak is what a full bar stands for."""


def draw_memory(picture: Picture, width: int, colour: bool) -> Iterator[Text]:
    """A heading, then a line a device: its memory over the whole step, its peak and its limit. A
    full bar is the largest limit where that is near, otherwise the highest peak of all devices. A
    peak above the device's limit is told in words.
    """
    margin = len(str(len(picture.memory) - 1)) + 1
    peaks = picture.peaks
    highest = max(peaks, default=0)
    limit = max((each for each in picture.limits if each is not None), default=0)
    full = limit if highest <= limit <= _NEAR * highest else highest
    yield Text(
        (
            "memory (a full bar is "
            f"{picture.memory_text(full)}{', the limit' if full == limit else ''})"
        )[:width]
    )
    bare = [f" {picture.memory_text(peak)}" for peak in peaks]
    labels = list(bare)
    for row, room in enumerate(picture.limits):
        if room is not None:
            labels[row] += f" {'of' if peaks[row] <= room else 'over'} {picture.memory_text(room)}"
    if width - margin - max(map(len, labels), default=0) < _LEAST_COLUMNS:
        labels = bare
    columns = max(4, width - margin - max(map(len, labels), default=0))
    for device, start in _middle_left_out(picture, margin):
        if device is None:
            yield Text(start)
            continue
        bars = _memory_bars(picture.memory[device], picture.end, columns, full)
        over = " over " in labels[device]
        yield Text.assemble(
            start,
            (bars, "cyan" if colour else ""),
            (labels[device], "red" if over and colour else ""),
        )


def _memory_bars(curve: Curve, end: float, columns: int, full: int) -> str:
    """The most memory in use in each of `columns` equal parts of the step, as bars."""
    highest = [0] * columns
    times = [*(time for time, _ in curve), end]
    columns_of = (
        [min(columns - 1, int(time / end * columns)) for time in times] if end else [0, columns - 1]
    )
    for (_, used), (first, last) in zip(curve, pairwise(columns_of), strict=False):
        for column in range(first, last + 1):
            highest[column] = max(highest[column], used)
    return "".join(_bar(used, full) for used in highest)


def _bar(used: int, full: int) -> str:
    """A character that is as high as `used` is of `full`."""
    return (
        _BARS[min(len(_BARS) - 1, int(used / full * len(_BARS)))]
        if full and used >= 0
        else _BARS[0]
    )


_MOST_ROWS = 32
"""Rows of one step of several."""
_LEAST_WIDTH = 2
"""Columns that tasks take in the middle; where they take fewer, how busy a device is is drawn
instead.
"""

Named = tuple[str, Picture]


def draw_timelines(steps: Sequence[Named], width: int, colour: bool) -> Iterator[Text]:
    """The steps' timelines on one axis of time, each with its length where it ends. Tasks are drawn
    where all of them are wide enough; of finer ones each column is as high as its device is busy.
    """
    axis, margin = _common_axis(steps, width)
    lengths = sorted(bar.end - bar.start for _, picture in steps for bar in picture.bars)
    as_tasks = not lengths or lengths[len(lengths) // 2] * axis.columns >= _LEAST_WIDTH * axis.end
    yield Text("timelines on one scale" + ("" if as_tasks else " (a full bar is a busy device)"))
    for name, picture in steps:
        yield _heading(name, picture, axis, margin)
        rows = picture.rows
        ends = picture.end_rows
        for device, label in _end_left_out(picture, margin):
            if device is None:
                yield Text(label)
            elif as_tasks:
                yield _task_row(label, rows[device], ends[device], (axis,), colour)
            else:
                yield Text.assemble(
                    label, (_busy(rows[device], picture.end, axis), "cyan" if colour else "")
                )
    if as_tasks:
        yield from _key([picture for _, picture in steps], colour, width - margin, margin)


def draw_memories(steps: Sequence[Named], width: int, colour: bool) -> Iterator[Text]:
    """Each device's memory over time on the same axis, all of one height, with its peak behind
    it.
    """
    peaks = {picture.memory_text(peak) for _, picture in steps for peak in picture.peaks}
    axis, margin = _common_axis(steps, width - 1 - max(map(len, peaks), default=0))
    full = max((peak for _, picture in steps for peak in picture.peaks), default=0)
    yield Text(f"memory on one scale (a full bar is {steps[0][1].memory_text(full)})")
    for name, picture in steps:
        yield _heading(name, picture, axis, margin)
        own = max(1, axis.column_of(picture.end))
        for device, label in _end_left_out(picture, margin):
            if device is None:
                yield Text(label)
                continue
            bars = _memory_bars(picture.memory[device], picture.end, own, full)
            peak = f" {picture.memory_text(picture.peaks[device])}"
            yield Text.assemble(
                label, (bars, "cyan" if colour else ""), " " * (axis.columns - own), peak
            )


def _common_axis(steps: Sequence[Named], width: int) -> tuple[TimeWindow, int]:
    """The axis to the end of the longest step, and the characters before a row."""
    margin = max(len(str(picture.device_of(len(picture.memory) - 1))) for _, picture in steps) + 1
    end = max(picture.end for _, picture in steps) or 1.0
    return TimeWindow(0.0, end, 0, max(20, width - margin)), margin


def _heading(name: str, picture: Picture, axis: TimeWindow, margin: int) -> Text:
    """The step's name, and its length as far to the right as it ends where both fit."""
    length = picture.time_text(picture.end) + " ▏"
    stop = margin + axis.column_of(picture.end) + 1
    if len(name) + len(length) + 1 <= stop:
        return Text(name + length.rjust(stop - len(name)))
    return Text(f"{name}: {picture.time_text(picture.end)}")


def _end_left_out(picture: Picture, margin: int) -> Iterator[tuple[int | None, str]]:
    """The rows that are drawn, with their labels; None for a line that says what is not."""
    count = len(picture.memory)
    for row in range(min(count, _MOST_ROWS)):
        yield row, f"{picture.device_of(row)} ".rjust(margin)
    notes = ["others do what one of these does"] if picture.devices else []
    notes += [f"{count - _MOST_ROWS} more"] if count > _MOST_ROWS else []
    if notes:
        yield None, " " * margin + ", ".join(notes)


def _busy(bars: Sequence[Bar], end: float, axis: TimeWindow) -> str:
    """Return a bar per column: the fraction of the column's time in which the device runs tasks.

    The columns end with the step. They are empty if the step takes no time.
    """
    columns = max(1, axis.column_of(end))
    size = end / columns
    if size == 0:  # A graph that only moves data is predicted to take no time.
        return " " * columns
    filled = [0.0] * columns
    for bar in bars:
        for column in range(int(bar.start / size), min(columns, int(bar.end / size) + 1)):
            filled[column] += max(
                0.0, min(bar.end, (column + 1) * size) - max(bar.start, column * size)
            )
    return "".join(
        _bar(round(1000 * min(1.0, each / size)), 1000) if each else " " for each in filled
    )
