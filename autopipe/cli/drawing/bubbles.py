"""Tables of the bubbles of measured steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table

from autopipe.api.measured_steps import MeasuredSteps, predicted_bubbles, worst_bubbles
from autopipe.api.timeline_figure import Picture
from autopipe.api.timeline_files import END, Bubble
from autopipe.cli.output import plain_table
from autopipe.ir.words import seconds_text

_MAX_LISTED_BUBBLES = 6


def bubble_screen(measured: MeasuredSteps, picture: Picture | None) -> Iterator[RenderableType]:
    """Yield tables of the bubbles of a mean step by rank, and of the largest bubbles."""
    steps = measured.steps
    predicted = {} if picture is None else predicted_bubbles(picture)
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    yield f"bubbles of {which}: a step's, by rank, and the largest"
    yield _bubbles_by_rank_table(measured.bubbles, len(steps), predicted)
    table = plain_table(
        "rank", "step", "before", "measured", "predicted", "waited for", right=3, no_wrap=True
    )
    table.columns[-1].justify = "left"
    for bubble in worst_bubbles(measured.bubbles, _MAX_LISTED_BUBBLES):
        before = "the end" if bubble.before == END else bubble.before
        expected = _predicted_text(predicted.get((bubble.rank, bubble.before)))
        row = (
            str(bubble.rank),
            str(bubble.step),
            before,
            seconds_text(bubble.duration / 1e6),
            expected,
        )
        table.add_row(*row, _cause_text(bubble))
    yield table


def _bubbles_by_rank_table(
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


def _cause_text(bubble: Bubble) -> str:
    if bubble.before == END:
        return "gradients, the update, other ranks"
    if (worst := bubble.worst) is None:
        return ""
    return f"rank {worst.peer}, channel {worst.channel}: {seconds_text(worst.duration / 1e6)}"
