"""Chrome trace events (for Perfetto) of a step, measured tasks read from a trace, and schedules in
the CSV format of PyTorch's pipeline schedules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopipe.api.timeline_figure import Picture
from autopipe.ir.codec import Index
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import JsonRecord


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """A task of one rank in one step, in microseconds from the start of the run."""

    rank: int
    step: int
    name: str
    start: float
    duration: float


END = "end"
"""Task name of the end of a step, in which gradients are summed and parameters are updated."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of a task for a message from rank `peer`, in microseconds from the start of the run."""

    peer: int
    channel: int
    start: float
    duration: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle time of a rank before the task `before`, in microseconds from the start of the run."""

    rank: int
    step: int
    before: str
    start: float
    duration: float
    waits: tuple[Wait, ...]
    """Waits of the task, in ascending order. The remaining idle time is spent on sending, on
    reading a batch, and in Python.
    """

    @property
    def late(self) -> float:
        return sum(wait.duration for wait in self.waits)

    @property
    def worst(self) -> Wait | None:
        return max(self.waits, key=lambda wait: wait.duration, default=None)


def read_measured(path: Path) -> tuple[MeasuredTask, ...]:
    """Return the tasks in a trace of `launch --trace`, in the order of the file. Raise
    ConfigurationError for any other file.
    """
    try:
        record = JsonRecord(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ConfigurationError(f"the file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        hint = "write a trace with autopipe launch --trace FILE"
        raise ConfigurationError(
            "the file is not a trace: its content is not valid JSON", hint, str(path)
        ) from error
    found = tuple(
        MeasuredTask(
            rank=event.get("tid", Index),
            step=event.at("args").get("step", Index),
            name=event.get("name", str),
            start=event.get("ts", float),
            duration=event.get("dur", float),
        )
        for event in record.at("traceEvents").items()
        if event.get("ph", str) == "X" and event.get("cat", str) == "measured"
    )
    if not found:
        raise ConfigurationError(
            "the trace contains no tasks",
            hint="write a trace with autopipe launch --trace FILE",
            where=str(path),
        )
    return found


PREDICTED = 1
MEASURED = 2
"""Process numbers in the trace: `PREDICTED` for the predicted step, `MEASURED` for measured tasks.
The threads of a process are the ranks.
"""
_LINKS = 1_000_000
"""First thread number of the links between ranks in the trace."""

Event = dict[str, object]


def chrome_trace(
    picture: Picture | None, measured: Sequence[MeasuredTask] = (), bubbles: Sequence[Bubble] = ()
) -> str:
    """Return a trace as JSON: one thread per rank with its tasks, one thread per link with its
    messages, and the memory of each rank as a counter.

    Times are in µs. If the figure's times have no unit, one unit of time is shown as a millisecond.
    If there are measured tasks, the prediction starts at the start of their last step, so that both
    can be compared; the first step includes warm-up. Measured bubbles are shown between the tasks,
    with the waits for messages inside them.
    """
    last = max((task.step for task in measured), default=0)
    starts = [task.start for task in measured if task.step == last]
    starts += [bubble.start for bubble in bubbles if bubble.step == last]
    origin = min(starts, default=0.0)
    events: list[Event] = []
    if picture is not None:
        scale = 1e6 if picture.physical else 1e3
        events += [
            *_ranks(PREDICTED, "predicted", len(picture.memory)),
            *_predicted(picture, origin, scale),
        ]
    if measured:
        events += _ranks(MEASURED, "measured", 1 + max(task.rank for task in measured))
    for task in measured:
        events.append(
            _span(
                MEASURED,
                task.rank,
                task.name,
                "measured",
                task.start,
                task.duration,
                step=task.step,
            )
        )
    for bubble in bubbles:
        events += _bubble(bubble)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _ranks(process: int, name: str, count: int) -> Iterator[Event]:
    yield _named("process_name", process, 0, name)
    for rank in range(count):
        yield _named("thread_name", process, rank, f"rank {rank}")


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _span(
    process: int, thread: int, name: str, kind: str, start: float, duration: float, **facts: object
) -> Event:
    named = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": kind}
    return {**named, "ts": start, "dur": duration, "args": facts}


def _bubble(bubble: Bubble) -> Iterator[Event]:
    start = bubble.start
    end = bubble.start + bubble.duration
    name = f"bubble before {bubble.before}"
    facts = {"step": bubble.step, "late_messages_us": bubble.late}
    yield _span(MEASURED, bubble.rank, name, "bubble", start, bubble.duration, **facts)
    for wait in bubble.waits:
        first = max(start, wait.start)
        last = min(end, wait.start + wait.duration)
        if last > first:
            name = f"late: rank {wait.peer}, channel {wait.channel}"
            facts = {
                "step": bubble.step,
                "peer": wait.peer,
                "channel": wait.channel,
                "seconds": wait.duration / 1e6,
            }
            yield _span(
                MEASURED,
                bubble.rank,
                name,
                "late message",
                first,
                last - first,
                task=bubble.before,
                **facts,
            )


def _predicted(picture: Picture, origin: float, scale: float) -> Iterator[Event]:
    """Yield the events of tasks, messages and memory. Each link has its own thread, because the
    messages of a rank may overlap, which one thread cannot show.
    """
    for bar in picture.bars:
        start = origin + bar.start * scale
        duration = (bar.end - bar.start) * scale
        facts = {"stage": bar.stage, "micro_batch": bar.unit}
        yield _span(
            PREDICTED, bar.device, bar.name, bar.phase.name.lower(), start, duration, **facts
        )
    links: dict[tuple[int, int], int] = {}
    for each in picture.transfers:
        link = each.source, each.target
        if link not in links:
            links[link] = _LINKS + len(links)
            yield _named(
                "thread_name", PREDICTED, links[link], f"rank {each.source} to {each.target}"
            )
        start = origin + each.start * scale
        duration = (each.end - each.start) * scale
        yield _span(
            PREDICTED,
            links[link],
            str(each.task),
            "send",
            start,
            duration,
            bytes=each.bytes,
            to=each.target,
        )
    unit = "bytes" if picture.physical else "used"
    for device, curve in enumerate(picture.memory):
        for time, used in curve:
            name = f"memory of rank {device}"
            yield {
                "ph": "C",
                "pid": PREDICTED,
                "name": name,
                "ts": origin + time * scale,
                "args": {unit: used},
            }


def orders_csv(picture: Picture) -> str:
    """Return one line per device with its tasks in order: stage, action (F, B, I or W) and
    micro-batch, for example `0F0,0F1,1F0`. The stages of blocks follow from their names and are
    numbered in the order of their first occurrence.
    """
    rows = (
        ",".join(f"{bar.stage}{bar.phase.value}{bar.unit}" for bar in row) for row in picture.rows
    )
    return "".join(f"{row}\n" for row in rows)
