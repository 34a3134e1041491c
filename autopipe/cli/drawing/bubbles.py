"""Bubbles of measured steps: the times in which a rank runs no task, the task that follows, and the
messages that this task waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.drawing.timeline_figure import Picture
from autopipe.cli.drawing.trace import END, Bubble, MeasuredTask, Wait
from autopipe.cli.output import plain_table
from autopipe.ir.words import seconds_text


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


_WORST = 6


def bubble_screen(measured: MeasuredSteps, picture: Picture | None) -> Iterator[RenderableType]:
    """Yield tables of the bubbles of a mean step by rank, and of the largest bubbles."""
    steps = measured.steps
    predicted = {} if picture is None else predicted_bubbles(picture)
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    yield f"bubbles of {which}: a step's, by rank, and the largest"
    yield _by_rank(measured.bubbles, len(steps), predicted)
    table = plain_table(
        "rank", "step", "before", "measured", "predicted", "waited for", right=3, no_wrap=True
    )
    table.columns[-1].justify = "left"
    for bubble in worst_bubbles(measured.bubbles, _WORST):
        before = "the end" if bubble.before == END else bubble.before
        expected = _predicted_text(predicted.get((bubble.rank, bubble.before)))
        row = (
            str(bubble.rank),
            str(bubble.step),
            before,
            seconds_text(bubble.duration / 1e6),
            expected,
        )
        table.add_row(*row, _blamed(bubble))
    yield table


def _by_rank(
    bubbles: Sequence[Bubble], steps: int, predicted: Mapping[tuple[int, str], float]
) -> Table:
    """Return a table of the bubbles of a mean step per rank, and of their causes."""
    table = plain_table(
        "rank", "bubbles", "predicted", "late messages", "update", "the rest", right=1, no_wrap=True
    )
    for rank in sorted({bubble.rank for bubble in bubbles}):
        own = [bubble for bubble in bubbles if bubble.rank == rank]
        idle = sum(each.duration for each in own)
        late = sum(each.late for each in own)
        update = sum(each.duration for each in own if each.before == END)
        parts = (seconds_text(each / 1e6 / steps) for each in (late, update, idle - late - update))
        expected = (
            sum(length for (device, _), length in predicted.items() if device == rank)
            if predicted
            else None
        )
        table.add_row(
            str(rank), seconds_text(idle / 1e6 / steps), _predicted_text(expected), *parts
        )
    return table


def _predicted_text(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds) if seconds > 1e-9 else "0 s"


def _blamed(bubble: Bubble) -> str:
    if bubble.before == END:
        return "gradients, the update, other ranks"
    if (worst := bubble.worst) is None:
        return ""
    return f"rank {worst.peer}, channel {worst.channel}: {seconds_text(worst.duration / 1e6)}"
