"""Timelines and memory over time as text, with one row per device: of one step, or of several steps
on one time scale.
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

from autopipe.api.timeline_figure import (
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
from autopipe.ir.timeline import StepEndKind, StepEndSpan
from autopipe.ir.words import plural

_MIN_TASK_COLUMNS = 3
"""Minimum number of columns for a short task. Its length is the lower quartile of the lengths per
stage and phase.
"""
_GAP_COLUMNS = 3
"""Columns between two time windows. They represent the omitted time."""
_MIN_STEADY_STATE_DIVISOR = 6
"""The repetitions of the steady state get at least the width of the row divided by this number,
however long warm-up and cool-down are.
"""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A range of time, and the columns in which it is drawn."""

    start: float
    end: float
    column: int
    columns: int

    def column_of(self, time: float) -> int:
        """Return the column of a time. For a time outside of the window, return the nearest
        edge.
        """
        share = (time - self.start) / (self.end - self.start)
        return self.column + min(self.columns, max(0, round(share * self.columns)))


Axis = tuple[TimeWindow, ...]
"""Time windows in ascending order. They map times to columns, with `_GAP_COLUMNS` columns between
two windows.
"""


def _time_axis(picture: Picture, columns: int) -> Axis:
    """Return a time axis of `columns` characters. If a typical task would be too narrow to be read,
    the axis has several windows and omits the time between them.
    """
    end = picture.end or 1.0
    whole = (TimeWindow(0.0, end, 0, columns),)
    lengths: dict[tuple[int, Phase], float] = {}
    for bar in picture.bars:
        lengths.setdefault((bar.stage, bar.phase), bar.end - bar.start)
    typical = sorted(lengths.values())[len(lengths) // 4] if lengths else end
    if typical <= 0 or typical * columns / end >= _MIN_TASK_COLUMNS:
        return whole
    state = picture.steady
    if state is None or state.period is None:
        scale = min(_MIN_TASK_COLUMNS / typical, 40 * columns / end)
        head = columns * 3 // 5
        tail = columns - head - _GAP_COLUMNS
        return _axis_of_pieces([(0.0, head), (end - tail / scale, tail)], scale, columns)
    # The scale is limited so that one repetition occupies at most half of the row, even if its
    # tasks are short.
    scale = min(_MIN_TASK_COLUMNS / typical, columns // 2 / state.period)
    if scale * end <= columns:
        return whole
    return _axis_of_steady_state(
        state, state.period * scale, end, scale, columns, 0 if picture.physical else scale
    )


def _axis_of_steady_state(
    state: SteadyState, width: float, end: float, scale: float, columns: int, unit: float
) -> Axis:
    """Return an axis that shows warm-up from its start, as many repetitions as fit, and cool-down
    to its end.

    `width` is the number of columns per repetition and `scale` the number of columns per unit of
    time. The columns of warm-up and cool-down are multiples of `unit`, which keeps integer times on
    whole columns; 0 allows any number.
    """
    least = min(state.count, max(1, int(columns / _MIN_STEADY_STATE_DIVISOR / width)))
    room = columns - 2 * _GAP_COLUMNS - math.ceil(least * width)
    warm_up = math.ceil(state.start * scale)
    cool_down = math.ceil((end - state.end) * scale)
    head = _round_to_units(min(warm_up, max(room // 2, room - cool_down)), unit)
    tail = _round_to_units(min(cool_down, room - head), unit)
    count = min(state.count, least + int((room - head - tail) / width))
    body = round(count * width)
    pieces = [(0.0, head), (state.start, body), (end - tail / scale, tail)]
    # If the warm-up is drawn completely, the repetitions follow it without a gap, so both form one
    # piece.
    if head == warm_up:
        pieces[:2] = [(0.0, round(state.start * scale) + body)]
    if count == state.count and tail == cool_down:
        pieces[-2:] = [(pieces[-2][0], pieces[-2][1] + tail)]
    return _axis_of_pieces([piece for piece in pieces if piece[1] > 0], scale, columns)


def _round_to_units(columns: int, unit: float) -> int:
    return round(int(columns / unit) * unit) if unit else columns


def _axis_of_pieces(pieces: list[tuple[float, int]], scale: float, columns: int) -> Axis:
    """Return the time windows of an axis of `columns` characters. `pieces` has one pair (start
    time, number of columns) per window, and `scale` is the number of columns per unit of time.
    Between two windows are `_GAP_COLUMNS` columns. The last window ends at the end of the row.
    """
    windows = []
    column = 0
    for index, (start, width) in enumerate(pieces):
        if index == len(pieces) - 1:
            width = max(1, columns) if index == 0 else width
            column = columns - width
        windows.append(TimeWindow(start, start + width / scale, column, width))
        column += width + _GAP_COLUMNS
    return tuple(windows)


_FILL_OF_END_KIND = {StepEndKind.GRADIENT_SUM: ":", StepEndKind.UPDATE: "#"}
_FILL_OF_PHASE = {
    Phase.FORWARD: "-",
    Phase.BACKWARD: "=",
    Phase.INPUT_GRADIENT: "+",
    Phase.WEIGHT_GRADIENT: "~",
}


def draw_timeline(picture: Picture, width: int, colour: bool) -> Iterator[Text]:
    """Yield lines of at most `width` characters: a row of tasks per device, the bracket of the
    steady state, and the time scale.

    A task shows its name if the name fits, followed by `-` (forward), `=` (backward), `+` (input
    gradient) or `~` (weight gradient). With `colour`, the background is the colour of its stage. On
    a device of several stages, the name is the letter of the phase, or the number of the stage
    without `colour`, and a key follows below. The key also explains gradient sums (`G:`) and
    updates (`U#`), which take at least one column. If the step does not fit, warm-up, some
    repetitions and cool-down are drawn, and a last line lists the omitted time.
    """
    margin = len(str(len(picture.memory) - 1)) + 1
    columns = max(20, width - margin)
    axis = _time_axis(picture, columns)
    rows = picture.rows
    ends = picture.end_rows
    for device, label in _rows_without_middle(picture, margin):
        yield (
            Text(label)
            if device is None
            else _task_row(label, rows[device], ends[device], axis, colour)
        )
    if picture.steady is not None:
        yield Text(" " * margin + _steady_state_bracket(picture.steady, axis))
    yield Text(" " * margin + _time_scale(picture, axis, columns))
    if picture.ends or _has_numbered_stages(picture):
        yield from _key_lines([picture], colour, width - margin, margin)
    hidden = [
        part
        for one, other in pairwise(axis)
        for part in _omitted_time_lines(picture, one.end, other.start)
    ]
    if hidden:
        for line in wrap(f"⋯ left out: {', '.join(hidden)}", width - margin):
            yield Text(" " * margin + line)


_MAX_DEVICE_ROWS = 64


def _rows_without_middle(picture: Picture, margin: int) -> Iterator[tuple[int | None, str]]:
    """Yield (device, label) for each drawn row. If there are more than `_MAX_DEVICE_ROWS` devices,
    those in the middle are omitted, and one pair with the device None stands for them.
    """
    count = len(picture.memory)
    half = _MAX_DEVICE_ROWS // 2
    for device in range(count):
        if count <= _MAX_DEVICE_ROWS or device < half or device >= count - half:
            yield device, f"{device:{margin - 1}} "
        elif device == half:
            yield (
                None,
                f"{'⋯':>{margin - 1}} {count - 2 * half} more {plural(count - 2 * half, 'device')}",
            )


def _task_row(
    label: str, bars: list[Bar], ends: list[StepEndSpan], axis: Axis, colour: bool
) -> Text:
    row = Text(label)
    several = _have_repeated_letters(bars)
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
                    _bar_cell(bar, end - start, _bar_names(bar, several, colour)),
                    style if colour else "",
                )
                position = end
        for kind, start, end in closing:
            if end > max(position, start):
                start = max(position, start)
                row.append(" " * (start - position))
                own = END_STYLES[kind]
                text = own.letter + _FILL_OF_END_KIND[kind] * (end - start - 1)
                row.append(text, Style(color=own.ink, bgcolor=own.fill) if colour else "")
                position = end
        row.append(" " * (window.column + window.columns - position))
        position = window.column + window.columns
    return row


def _end_columns(ends: list[StepEndSpan], window: TimeWindow) -> list[tuple[StepEndKind, int, int]]:
    """Return (kind, first column, end column) of the gradient sums and the update of a device in a
    window.

    Each takes at least one column. If the window has no columns left, they move to the left, over
    the last task.
    """
    found: list[tuple[StepEndKind, int, int]] = []
    position = window.column
    for span in ends:
        if span.end > window.start and span.start < window.end:
            start = max(position, window.column_of(span.start))
            position = max(start + 1, window.column_of(span.end))
            found.append((span.kind, start, position))
    too_far = max(0, position - window.column - window.columns)
    return [(kind, start - too_far, end - too_far) for kind, start, end in found]


def _has_numbered_stages(picture: Picture) -> bool:
    """Return True if a device has several stages that only a stage number distinguishes."""
    return any(_have_repeated_letters(bars) and bars[0].name[:1].isdigit() for bars in picture.rows)


def _have_repeated_letters(bars: list[Bar]) -> bool:
    """Return True if a device has several stages whose phase letters have the same case. F3 and f3
    distinguish two stages.
    """
    stages = Counter(
        is_upper for _, is_upper in {(bar.stage, bar.letter.isupper()) for bar in bars}
    )
    return any(count > 1 for count in stages.values())


def _bar_names(bar: Bar, several: bool, colour: bool) -> tuple[str, ...]:
    if not several:
        return bar.label, bar.letter
    # The generated name of a task starts with the number of its stage. Any other name was chosen by
    # the user and is preferred.
    if not bar.name[:1].isdigit():
        return bar.name, bar.label, bar.letter
    return (bar.letter,) if colour else (str(bar.stage),)


def _bar_cell(bar: Bar, width: int, names: tuple[str, ...]) -> str:
    """Return the first of the names that fits in `width` characters, followed by the fill character
    of the phase.
    """
    name = next((each for each in names if len(each) <= width), "")
    # The user may give a block any name. A character that does not take exactly one column would
    # break the row, and a control character could change the terminal's state.
    told = "".join(letter if letter == "·" or " " < letter <= "~" else "?" for letter in name)
    return told + _FILL_OF_PHASE[bar.phase] * (width - len(told))


def _key_lines(
    pictures: Sequence[Picture], colour: bool, width: int, margin: int
) -> Iterator[Text]:
    """Yield the lines of the key: the letters and fill characters of the phases, gradient sums and
    updates, and with `colour` the number of each stage on its colour.
    """
    legend = legend_of(pictures)
    numbered = not colour and any(map(_has_numbered_stages, pictures))
    told = [
        f"{'' if numbered else letter}{_FILL_OF_PHASE[phase]} {PHASE_NAMES[phase]}"
        for letter, phase in legend.phases
    ]
    told += [
        f"{END_STYLES[kind].letter}{_FILL_OF_END_KIND[kind]} {kind.value}" for kind in legend.ends
    ]
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


def _steady_state_bracket(state: SteadyState, axis: Axis) -> str:
    """Return the bracket below the steady state. It has a mark at the start of each repetition if
    the marks fit.
    """
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


def _time_scale(picture: Picture, axis: Axis, columns: int) -> str:
    line = [" "] * columns
    end = picture.time_text(picture.end)
    line[columns - len(end) :] = end
    for window in axis:
        text = picture.time_text(window.start) if window.start else "0"
        if window.column + len(text) < columns - len(end):
            line[window.column : window.column + len(text)] = text
    return "".join(line)


def _omitted_time_lines(picture: Picture, start: float, end: float) -> Iterator[str]:
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


_BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
_MIN_BAR_COLUMNS = 10
"""If the bars get fewer columns than this, the labels show the peaks without the limits."""
_LIMIT_SCALE_FACTOR = 2
"""A full bar represents the limit if the limit is between the highest peak and this multiple of
it.
"""


def draw_memory(picture: Picture, width: int, colour: bool) -> Iterator[Text]:
    """Yield a heading, then one line per device: its memory over the whole step, its peak and its
    limit.

    A full bar is the largest limit if it is near the highest peak (`_LIMIT_SCALE_FACTOR`),
    otherwise the highest peak of all devices. The label says if a peak is above its device's limit.
    """
    margin = len(str(len(picture.memory) - 1)) + 1
    peaks = picture.peaks
    highest = max(peaks, default=0)
    limit = max((each for each in picture.limits if each is not None), default=0)
    full = limit if highest <= limit <= _LIMIT_SCALE_FACTOR * highest else highest
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
    if width - margin - max(map(len, labels), default=0) < _MIN_BAR_COLUMNS:
        labels = bare
    columns = max(4, width - margin - max(map(len, labels), default=0))
    for device, start in _rows_without_middle(picture, margin):
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
    """Return a bar per column: the maximum memory in use in each of `columns` equal parts of the
    step.
    """
    highest = [0] * columns
    times = [*(time for time, _ in curve), end]
    columns_of = (
        [min(columns - 1, int(time / end * columns)) for time in times] if end else [0, columns - 1]
    )
    for (_, used), (first, last) in zip(curve, pairwise(columns_of), strict=False):
        for column in range(first, last + 1):
            highest[column] = max(highest[column], used)
    return "".join(_bar_character(used, full) for used in highest)


def _bar_character(used: int, full: int) -> str:
    """Return a character whose height represents `used / full`."""
    return (
        _BAR_CHARACTERS[min(len(_BAR_CHARACTERS) - 1, int(used / full * len(_BAR_CHARACTERS)))]
        if full and used >= 0
        else _BAR_CHARACTERS[0]
    )


_MAX_ROWS_PER_STEP = 32
"""Maximum number of device rows per step if several steps are drawn."""
_MIN_MEDIAN_TASK_COLUMNS = 2
"""Minimum number of columns of the median task. If the median task is narrower, the rows show how
busy each device is instead of its tasks.
"""

NamedPicture = tuple[str, Picture]


def draw_timelines(steps: Sequence[NamedPicture], width: int, colour: bool) -> Iterator[Text]:
    """Yield the timelines of several steps on one time axis. The heading of each step has its
    length, at the column in which the step ends.

    Tasks are drawn if the median task is wide enough. Otherwise, the height of each column is the
    fraction of the time in which the device is busy.
    """
    axis, margin = _common_axis(steps, width)
    lengths = sorted(bar.end - bar.start for _, picture in steps for bar in picture.bars)
    as_tasks = (
        not lengths
        or lengths[len(lengths) // 2] * axis.columns >= _MIN_MEDIAN_TASK_COLUMNS * axis.end
    )
    yield Text("timelines on one scale" + ("" if as_tasks else " (a full bar is a busy device)"))
    for name, picture in steps:
        yield _heading(name, picture, axis, margin)
        rows = picture.rows
        ends = picture.end_rows
        for device, label in _rows_without_end(picture, margin):
            if device is None:
                yield Text(label)
            elif as_tasks:
                yield _task_row(label, rows[device], ends[device], (axis,), colour)
            else:
                yield Text.assemble(
                    label, (_busy_bars(rows[device], picture.end, axis), "cyan" if colour else "")
                )
    if as_tasks:
        yield from _key_lines([picture for _, picture in steps], colour, width - margin, margin)


def draw_memories(steps: Sequence[NamedPicture], width: int, colour: bool) -> Iterator[Text]:
    """Yield the memory of each device over time, on one time axis and one memory scale for all
    steps. Each row ends with the peak.
    """
    peaks = {picture.memory_text(peak) for _, picture in steps for peak in picture.peaks}
    axis, margin = _common_axis(steps, width - 1 - max(map(len, peaks), default=0))
    full = max((peak for _, picture in steps for peak in picture.peaks), default=0)
    yield Text(f"memory on one scale (a full bar is {steps[0][1].memory_text(full)})")
    for name, picture in steps:
        yield _heading(name, picture, axis, margin)
        own = max(1, axis.column_of(picture.end))
        for device, label in _rows_without_end(picture, margin):
            if device is None:
                yield Text(label)
                continue
            bars = _memory_bars(picture.memory[device], picture.end, own, full)
            peak = f" {picture.memory_text(picture.peaks[device])}"
            yield Text.assemble(
                label, (bars, "cyan" if colour else ""), " " * (axis.columns - own), peak
            )


def _common_axis(steps: Sequence[NamedPicture], width: int) -> tuple[TimeWindow, int]:
    """Return an axis that ends with the longest step, and the number of characters before a row."""
    margin = max(len(str(picture.device_of(len(picture.memory) - 1))) for _, picture in steps) + 1
    end = max(picture.end for _, picture in steps) or 1.0
    return TimeWindow(0.0, end, 0, max(20, width - margin)), margin


def _heading(name: str, picture: Picture, axis: TimeWindow, margin: int) -> Text:
    """Return a line with the name of a step and its length. The length is at the column in which
    the step ends if both fit, otherwise directly after the name.
    """
    length = picture.time_text(picture.end) + " ▏"
    stop = margin + axis.column_of(picture.end) + 1
    if len(name) + len(length) + 1 <= stop:
        return Text(name + length.rjust(stop - len(name)))
    return Text(f"{name}: {picture.time_text(picture.end)}")


def _rows_without_end(picture: Picture, margin: int) -> Iterator[tuple[int | None, str]]:
    """Yield (row, label) for the drawn rows. The last pair may have the row None and a label that
    describes the omitted rows.
    """
    count = len(picture.memory)
    for row in range(min(count, _MAX_ROWS_PER_STEP)):
        yield row, f"{picture.device_of(row)} ".rjust(margin)
    notes = ["others do what one of these does"] if picture.devices else []
    notes += [f"{count - _MAX_ROWS_PER_STEP} more"] if count > _MAX_ROWS_PER_STEP else []
    if notes:
        yield None, " " * margin + ", ".join(notes)


def _busy_bars(bars: Sequence[Bar], end: float, axis: TimeWindow) -> str:
    """Return a bar per column: the fraction of the column's time in which the device runs tasks.

    The columns end with the step. They are empty if the step takes no time.
    """
    columns = max(1, axis.column_of(end))
    size = end / columns
    # The predicted step time of a graph that only moves data is 0, so the row is empty.
    if size == 0:
        return " " * columns
    filled = [0.0] * columns
    for bar in bars:
        for column in range(int(bar.start / size), min(columns, int(bar.end / size) + 1)):
            filled[column] += max(
                0.0, min(bar.end, (column + 1) * size) - max(bar.start, column * size)
            )
    return "".join(
        _bar_character(round(1000 * min(1.0, each / size)), 1000) if each else " "
        for each in filled
    )
