"""The tasks of measured steps, and their bubbles: the times in which a rank runs no task, with the
task that follows and the messages that this task waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.api.timeline_figure import Picture
from autopipe.api.timeline_files import END, Bubble, MeasuredTask, Wait


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    tasks: tuple[MeasuredTask, ...]
    bubbles: tuple[Bubble, ...]
    seconds: float
    """Seconds of all ranks and steps together."""

    @property
    def steps(self) -> range:
        numbers = [task.step for task in self.tasks]
        return range(min(numbers, default=0), max(numbers, default=-1) + 1)


def measured_steps(times: Mapping[int, Sequence[Mapping[str, Any]]]) -> MeasuredSteps:
    """Return the measured tasks and bubbles. `times` has, by rank, the times of steps that the
    ranks wrote (`runtime/watch/report.py`).
    """
    origin = min((step["began"] for steps in times.values() for step in steps), default=0.0)
    tasks: list[MeasuredTask] = []
    bubbles: list[Bubble] = []
    seconds = 0.0
    for rank, steps in sorted(times.items()):
        for step in steps:
            began = (step["began"] - origin) * 1e6
            own = [
                MeasuredTask(
                    rank, step["step"], span["task"], began + span["start"] * 1e6, _length(span)
                )
                for span in step["spans"]
            ]
            waits = defaultdict[str, list[Wait]](list)
            for wait in step["waits"]:
                found = Wait(
                    wait["peer"], wait["channel"], began + wait["start"] * 1e6, _length(wait)
                )
                waits[wait["task"]].append(found)
            tasks += own
            bubbles += _bubbles(
                own, waits, rank, step["step"], began, began + step["seconds"] * 1e6
            )
            seconds += step["seconds"]
    return MeasuredSteps(tuple(tasks), tuple(bubbles), seconds)


def _length(span: Mapping[str, Any]) -> float:
    return float(span["end"] - span["start"]) * 1e6


def _bubbles(
    tasks: Sequence[MeasuredTask],
    waits: Mapping[str, Sequence[Wait]],
    rank: int,
    step: int,
    began: float,
    ended: float,
) -> Iterator[Bubble]:
    at = began
    for task in sorted(tasks, key=lambda task: task.start):
        if task.start > at:
            yield Bubble(
                rank, step, task.name, at, task.start - at, tuple(waits.get(task.name, ()))
            )
        at = max(at, task.start + task.duration)
    if ended > at:
        yield Bubble(rank, step, END, at, ended - at, ())


def predicted_bubbles(picture: Picture) -> dict[tuple[int, str], float]:
    """Return the seconds that each device waits before each task of the predicted step, and before
    the end of the step.
    """
    found: dict[tuple[int, str], float] = {}
    for rank, row in enumerate(picture.rows):
        at = 0.0
        for bar in row:
            found[rank, bar.name] = max(0.0, bar.start - at)
            at = max(at, bar.end)
        found[rank, END] = max(0.0, picture.end - at)
    return found


def worst_bubbles(bubbles: Iterable[Bubble], count: int) -> list[Bubble]:
    return sorted(bubbles, key=lambda bubble: -bubble.duration)[:count]
