"""The timeline of a step as text: a row a device."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from textwrap import wrap

from rich.style import Style
from rich.text import Text

from autopipe.cli.drawing.axis import TimeAxis, TimeWindow, time_axis
from autopipe.cli.drawing.palette import stage_colour, text_colour
from autopipe.cli.drawing.picture import Bar, Picture
from autopipe.cli.drawing.rows import row_margin, timeline_rows
from autopipe.cli.drawing.steady import SteadyState
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
