"""Tasks of a device in a step, and the devices it waits for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autopipe.ir.placement import Placement
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import Prediction, Span, Timeline, Transfer

Timed = TypeVar("Timed", Span, Transfer)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device's step, in seconds that add up to all of it."""

    device: int
    stages: tuple[int, ...]
    tasks: tuple[tuple[str, int, float], ...]
    """For each stage and phase, such as `2F`, how many tasks and their seconds together."""
    gradients_s: float
    update_s: float
    waits: tuple[tuple[int, float], ...]
    """Seconds that it waits for other devices to compute, the longest first."""
    messages_s: float
    """Seconds that it waits for messages on their way."""
    end_s: float
    """Seconds that it waits at the end, for gradients of others or for the last device to be done."""
    first_s: float
    """When its first task starts."""
    static_bytes: int
    peak_bytes: int

    @property
    def busy_s(self) -> float:
        """Seconds in which it does something."""
        return sum(seconds for _, _, seconds in self.tasks) + self.gradients_s + self.update_s


def device_report(placement: Placement, prediction: Prediction, timeline: Timeline, device: int) -> DeviceReport:
    """The report on a device in the step of a timeline."""
    spans = [span for span in timeline.spans if span.device == device]
    stages = tuple(index for index, stage in enumerate(placement.stages) if device in stage.devices)
    waits, messages = _waits(placement, timeline, spans)
    gradients = sum(prediction.stages[stage].gradient_s for stage in stages)
    update = sum(prediction.stages[stage].update_s for stage in stages)
    last = max((span.end for span in spans), default=0.0)
    return DeviceReport(
        device=device,
        stages=stages,
        tasks=_tasks(spans),
        gradients_s=gradients,
        update_s=update,
        waits=tuple(sorted(waits.items(), key=lambda each: (-each[1], each[0]))),
        messages_s=messages,
        end_s=timeline.end - last - gradients - update,
        first_s=spans[0].start if spans else 0.0,
        static_bytes=timeline.static_memory[device],
        peak_bytes=timeline.peak_memory[device],
    )


def _tasks(spans: list[Span]) -> tuple[tuple[str, int, float], ...]:
    counts: Counter[tuple[int, Phase]] = Counter()
    seconds: defaultdict[tuple[int, Phase], float] = defaultdict(float)
    for span in spans:
        key = span.task.stage, span.task.phase
        counts[key] += 1
        seconds[key] += span.end - span.start
    return tuple((f"{stage}{phase.value}", count, seconds[stage, phase]) for (stage, phase), count in counts.items())


def _waits(placement: Placement, timeline: Timeline, spans: list[Span]) -> tuple[Mapping[int, float], float]:
    """Seconds by device that is waited for, and seconds of waiting for messages on their way."""
    ends, arrivals = _by_end(timeline.spans), _by_end(timeline.transfers)
    waits: defaultdict[int, float] = defaultdict(float)
    messages = free = 0.0
    for span in spans:
        gap = span.start - free
        group = placement.stages[span.task.stage].devices
        if gap > 0.0:
            brought = [each for each in arrivals.get(span.start, ()) if each.target in group]
            if brought:
                last = max(brought, key=lambda each: each.start)
                flying = min(gap, last.end - last.start)
                messages += flying
                if gap > flying:
                    waits[last.source] += gap - flying
            else:
                before = [each.device for each in ends.get(span.start, ()) if each.device != span.device]
                own = [device for device in before if device in group]
                waits[min(own or before, default=span.device)] += gap
        free = span.end
    return waits, messages


def _by_end(timed: Iterable[Timed]) -> Mapping[float, list[Timed]]:
    """Tasks by end: a task starts at the very float that the one it waited for ends at."""
    found: defaultdict[float, list[Timed]] = defaultdict(list)
    for each in timed:
        found[each.end].append(each)
    return found
