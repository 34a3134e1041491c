"""The page of plans side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopipe.cli.compared import PARTS, ComparedPlan, ComparisonRow, breakdown_rows, figure_rows, parts_of
from autopipe.cli.differences import PlanDiff
from autopipe.cli.drawing.alike import MOST_DEVICES, one_of_each
from autopipe.cli.drawing.markup import escape, markup_table
from autopipe.cli.drawing.picture import plan_picture
from autopipe.cli.drawing.report import Report
from autopipe.cli.figures import seconds_text

_HUES = (213, 4, 30, 138, 174, 96, 330, 53, 246, 290, 15, 195)
"""Hues of the parts of a step, in their order."""


def compare_report(plans: Sequence[ComparedPlan], contrasts: Sequence[PlanDiff]) -> Report:
    """Steps and memory on one axis of time, figures, what a step's time goes to, and what is decided otherwise."""
    names = [str(each.folder) for each in plans]
    bare = [each.plan for each in plans]
    sections = [("Figures", _table(names, figure_rows(bare)))]
    parts = list(breakdown_rows(bare))
    if parts:
        sections.append(
            ("What a step's time goes to, on average over the devices", _bars(plans) + _table(names, parts))
        )
    if len(plans) > 1:
        sections.append((f"Decided otherwise than in {names[0]}", "".join(_contrasts(plans, contrasts))))
    subtitle = ", ".join(dict.fromkeys(plan.model for plan in bare))
    if any(plan.summary.devices > MOST_DEVICES for plan in bare):
        subtitle += "; of devices with the same tasks one is drawn"
    return Report(
        title=f"{len(plans)} plans compared",
        subtitle=subtitle,
        figures=tuple((name, seconds_text(plan.summary.step_time_s)) for name, plan in zip(names, bare, strict=True)),
        pictures=tuple(
            (name, one_of_each(plan_picture(each.plan, each.timeline))) for name, each in zip(names, plans, strict=True)
        ),
        sections=tuple(sections),
    )


def _table(names: Sequence[str], rows: Iterable[ComparisonRow]) -> str:
    """A row a figure, the best marked."""
    marked = []
    for row in rows:
        cells = (
            f'<td class="best">{escape(text)}</td>' if place in row.best else f"<td>{escape(text)}</td>"
            for place, text in enumerate(row.texts)
        )
        marked.append(f"<tr><td>{escape(row.name)}</td>{''.join(cells)}</tr>")
    return f'<div class="compared">{markup_table(("", *names), marked)}</div>'


def _bars(plans: Sequence[ComparedPlan]) -> str:
    """Each step as a bar of its parts, all on one scale, and what the colours are."""
    longest = max(each.plan.summary.step_time_s for each in plans)
    lines, shown = [], set()
    for each in plans:
        if each.plan.breakdown is None:
            continue
        pieces = []
        for name, seconds in parts_of(each.plan.breakdown):
            if seconds > 0 and longest:
                shown.add(name)
                title = escape(f"{name}: {seconds_text(seconds)}")
                width = 100 * seconds / longest
                pieces.append(f'<i title="{title}" style="width:{width:.3f}%;background:{_colour(name)}"></i>')
        lines.append(f"<div>{escape(str(each.folder))}</div><div>{''.join(pieces)}</div>")
    legend = "".join(
        f'<span><i style="background:{_colour(name)}"></i>{escape(name)}</span>' for name in PARTS if name in shown
    )
    return f'<div class="parts">{"".join(lines)}</div><p class="legend">{legend}</p>'


def _contrasts(plans: Sequence[ComparedPlan], contrasts: Sequence[PlanDiff]) -> Iterator[str]:
    for each, contrast in zip(plans[1:], contrasts[1:], strict=True):
        lines = "\n".join(contrast.lines)
        yield f"<h3>{escape(str(each.folder))}</h3><pre>{escape(lines)}</pre>"


def _colour(part: str) -> str:
    return f"hsl({_HUES[PARTS.index(part) % len(_HUES)]} 60% 55%)"
