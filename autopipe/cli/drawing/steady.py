"""The part of a step in which all devices repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.schedule import Repetend, Schedule
from autopipe.ir.timeline import Span, Timeline

_TOLERANCE = 1e-2
"""Share of a period by which repetitions may differ and still count as alike."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Times from `start` to `end` in which every device repeats, `count` times."""

    start: float
    end: float
    count: int
    period: float | None = None
    """Length of one repetition; None where repetitions take different times."""


def spans_by_device(timeline: Timeline) -> list[list[Span]]:
    """Each device's spans in order of time."""
    found: list[list[Span]] = [[] for _ in timeline.memory]
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        found[span.device].append(span)
    return found


def steady_state(schedule: Schedule, timeline: Timeline, turns: Sequence[int] = ()) -> SteadyState | None:
    """Where the devices' repetends overlap in time; None where they do not. `turns` are those of the stages.

    Best is a stretch in which all devices move on at one pace. A step too short for that still has the stretch in which
    each device is in its repetend: the same tasks again and again, though they come at different intervals.
    """
    repeating = []
    for repetend, spans in zip(schedule.repetends or (), spans_by_device(timeline), strict=False):
        if spans:
            repeating.append((repetend, spans))
    if not repeating or any(repetend.count < 2 for repetend, _ in repeating):
        return None
    return _one_pace([_regular(*each, turns) for each in repeating]) or _overlap(repeating)


@dataclass(frozen=True, slots=True)
class _Regular:
    """The longest stretch of one device in which each repetition comes `period` after the one before."""

    start: float
    end: float
    period: float
    stride: float
    """In micro-batches of the step, of which a stage may take several turns for one."""


def _regular(repetend: Repetend, spans: list[Span], turns: Sequence[int]) -> _Regular:
    body = spans[repetend.start : repetend.start + repetend.length * repetend.count]
    starts = np.array([span.start for span in body]).reshape(repetend.count, repetend.length)
    steps = np.diff(starts, axis=0)
    best, first = (0, 0), 0
    for row in range(len(steps)):
        around = steps[first : row + 1]
        if np.ptp(around) > _TOLERANCE * max(float(around.max()), 0.0):
            first = row
        if row + 1 - first > best[1] - best[0]:
            best = (first, row + 1)
    period = float(steps[best[0] : best[1]].mean())
    start = float(starts[best[0], 0])
    stride = repetend.stride / (turns[body[0].task.stage] if turns else 1)
    return _Regular(start, start + period * (best[1] - best[0] + 1), period, stride)


def _one_pace(found: list[_Regular]) -> SteadyState | None:
    paces = [each.period / each.stride for each in found]
    if max(paces) <= 0 or max(paces) - min(paces) > _TOLERANCE * max(paces):
        return None
    start, end = max(each.start for each in found), min(each.end for each in found)
    period = max(each.period for each in found)
    count = int((end - start) / period + _TOLERANCE)
    return SteadyState(start, start + count * period, count, period) if count >= 2 else None


def _overlap(repeating: list[tuple[Repetend, list[Span]]]) -> SteadyState | None:
    start = max(spans[repetend.start].start for repetend, spans in repeating)
    end = min(spans[repetend.start + repetend.length * repetend.count - 1].end for repetend, spans in repeating)
    return SteadyState(start, end, min(repetend.count for repetend, _ in repeating)) if start < end else None
