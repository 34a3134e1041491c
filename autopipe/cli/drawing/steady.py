"""The part of a step in which all devices repeat."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.schedule import Schedule
from autopipe.ir.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Seconds from `start` to `end` in which every device is in its repetend, and how often the rarest repeats."""

    start: float
    end: float
    count: int


def spans_by_device(timeline: Timeline) -> list[list[Span]]:
    """Each device's spans in order of time."""
    found: list[list[Span]] = [[] for _ in timeline.memory]
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        found[span.device].append(span)
    return found


def steady_state(schedule: Schedule, timeline: Timeline) -> SteadyState | None:
    """Where the devices' repetends overlap in time; None where they do not."""
    if schedule.repetends is None:
        return None
    starts, ends, counts = [], [], []
    for repetend, spans in zip(schedule.repetends, spans_by_device(timeline), strict=True):
        if not spans:
            continue
        if repetend.count < 2:
            return None
        starts.append(spans[repetend.start].start)
        ends.append(spans[repetend.start + repetend.length * repetend.count - 1].end)
        counts.append(repetend.count)
    if not starts or max(starts) >= min(ends):
        return None
    return SteadyState(max(starts), min(ends), min(counts))
