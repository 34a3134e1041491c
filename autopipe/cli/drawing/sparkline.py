"""Memory over time as text: a line of bars a device."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from autopipe.cli.drawing.picture import Curve, Picture
from autopipe.cli.drawing.rows import row_margin, timeline_rows

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
