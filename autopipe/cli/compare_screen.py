"""Plans side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.cli.compared import ComparedPlan, ComparisonRow, breakdown_rows, figure_rows
from autopipe.cli.differences import PlanDiff
from autopipe.cli.drawing.aligned import draw_memories, draw_timelines
from autopipe.cli.drawing.alike import one_of_each
from autopipe.cli.drawing.picture import plan_picture


def compare_screen(
    plans: Sequence[ComparedPlan], contrasts: Sequence[PlanDiff], width: int, colour: bool
) -> Iterator[RenderableType]:
    """Figures, what a step's time goes to, what is decided differently, timelines and memory."""
    folders = [each.folder for each in plans]
    yield _table("", folders, figure_rows([each.plan for each in plans]))
    parts = list(breakdown_rows([each.plan for each in plans]))
    if parts:
        yield ""
        yield _table("step, by what it goes to", folders, parts)
    for each, contrast in zip(plans[1:], contrasts[1:], strict=True):
        yield ""
        yield f"{each.folder} against {plans[0].folder}:"
        yield from (f"  {line}" for line in contrast.lines)
    steps = [(str(each.folder), one_of_each(plan_picture(each.plan, each.timeline))) for each in plans]
    yield ""
    yield from draw_timelines(steps, width, colour)
    yield ""
    yield from draw_memories(steps, width, colour)


def _table(head: str, folders: Sequence[Path], rows: Iterable[ComparisonRow]) -> Table:
    table = Table(head, *map(str, folders), box=None, pad_edge=False)
    for row in rows:
        cells = (Text(text, "bold green" if place in row.best else "") for place, text in enumerate(row.texts))
        table.add_row(row.name, *cells)
    return table
