"""The timeline of a step as text: a row a device, then its memory."""

from __future__ import annotations

from collections.abc import Iterator

from rich.style import Style
from rich.text import Text

from autopipe.cli.drawing.axis import TimeAxis, time_axis
from autopipe.cli.drawing.palette import stage_colour, text_colour
from autopipe.cli.drawing.steady import SteadyState, spans_by_device, steady_state
from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase, Task
from autopipe.ir.timeline import Span, Timeline

_FILL = {Phase.FORWARD: "-", Phase.BACKWARD: "=", Phase.INPUT_GRADIENT: "=", Phase.WEIGHT_GRADIENT: "~"}
_BARS = "▁▂▃▄▅▆▇█"


def draw_timeline(plan: Plan, timeline: Timeline, width: int, colour: bool) -> Iterator[Text]:
    """Lines of at most `width` characters: the devices' tasks, the repetend's bracket, the scale.

    A task is its name as far as it fits, filled with `-` (forward) or `=` (backward); with `colour` on its stage's
    colour. Where the step does not fit, its middle is left out.
    """
    margin = len(str(len(timeline.memory) - 1)) + 1
    axis = time_axis(timeline, max(20, width - margin))
    for device, spans in enumerate(spans_by_device(timeline)):
        several = len({span.task.stage for span in spans}) > 1
        yield _row(f"{device:{margin - 1}} ", spans, axis, several, colour)
    state = steady_state(plan.schedule, timeline)
    if state is not None:
        yield Text(" " * margin + _bracket(state, axis))
    yield Text(" " * margin + _scale(axis))


def draw_memory(timeline: Timeline, width: int, colour: bool) -> Iterator[Text]:
    """A line a device: its memory over time, the highest of all devices as a full bar, and its peak."""
    margin = len(str(len(timeline.memory) - 1)) + 1
    most = max(timeline.peak_memory)
    labels = [f" {bytes_text(peak)}" for peak in timeline.peak_memory]
    columns = max(4, width - margin - max(map(len, labels)))
    for device, (curve, label) in enumerate(zip(timeline.memory, labels, strict=True)):
        bars = "".join(_bar(used, most) for used in _highest(curve, timeline.end, columns))
        yield Text.assemble(f"{device:{margin - 1}} ", (bars, "cyan" if colour else ""), label)


def _row(label: str, spans: list[Span], axis: TimeAxis, several: bool, colour: bool) -> Text:
    row = Text(label)
    position = 0
    for span in spans:
        if axis.hidden(span.start, span.end):
            continue
        start, end = max(position, axis.column(span.start)), axis.column(span.end)
        if end <= start:
            continue
        position = _pad(row, position, start, axis)
        row.append(_cell(span.task, end - start, several), _style(span.task) if colour else "")
        position = end
    _pad(row, position, axis.columns, axis)
    return row


def _pad(row: Text, position: int, start: int, axis: TimeAxis) -> int:
    gap = axis.head_columns
    if not axis.whole and position <= gap < start:
        row.append(" " * (gap - position) + "⋯" + " " * (start - gap - 1))
    else:
        row.append(" " * (start - position))
    return start


def _cell(task: Task, width: int, several: bool) -> str:
    name = str(task) if several else f"{task.phase.value}{task.micro_batch}"
    if len(name) > width:
        name = task.phase.value if len(task.phase.value) <= width else ""
    return name + _FILL[task.phase] * (width - len(name))


def _style(task: Task) -> Style:
    return Style(color=text_colour(task.phase), bgcolor=stage_colour(task.stage, task.phase))


def _bracket(state: SteadyState, axis: TimeAxis) -> str:
    start, end = axis.column(state.start), max(axis.column(state.end), axis.column(state.start) + 2)
    label = f" repetend ×{state.count} "
    inside = end - start - 2
    filled = label.center(inside, "─") if inside >= len(label) else "─" * inside
    return " " * start + "└" + filled + "┘"


def _scale(axis: TimeAxis) -> str:
    end = seconds_text(axis.end)
    return "0" + end.rjust(axis.columns - 1)


def _highest(curve: tuple[tuple[float, int], ...], end: float, columns: int) -> list[int]:
    """The most bytes in use in each of `columns` equal parts of the step."""
    highest = [0] * columns
    for (start, used), stop in zip(curve, [*(time for time, _ in curve[1:]), end], strict=True):
        first = min(columns - 1, int(start / end * columns)) if end else 0
        last = min(columns - 1, int(stop / end * columns)) if end else columns - 1
        for column in range(first, last + 1):
            highest[column] = max(highest[column], used)
    return highest


def _bar(used: int, most: int) -> str:
    return _BARS[min(len(_BARS) - 1, int(used / most * len(_BARS)))] if most else _BARS[0]
