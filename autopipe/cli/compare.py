"""`autopipe compare`: compares the metrics, decisions, timelines and memory of several plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.api.comparison import Change, ComparisonPlan, PlanDiff, speedup
from autopipe.api.comparison import compare as compare_plans
from autopipe.api.summary_text import number_text
from autopipe.api.timeline_figure import MOST_DEVICES
from autopipe.cli.drawing.report import Report, legend_markup, report_page
from autopipe.cli.drawing.svg import escape, markup_table
from autopipe.cli.drawing.terminal import draw_memories, draw_timelines
from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output, plain_table
from autopipe.cli.plan_report import gap_text
from autopipe.ir.model_parts import parts_text
from autopipe.ir.output_kinds import REPORT, OutputFile, plan_inputs, write_texts
from autopipe.ir.plan import Breakdown, Plan, Summary
from autopipe.ir.words import bytes_text, plural, seconds_text


@click.command()
@click.argument("plans", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option(
    "--html",
    metavar="FILE",
    type=PATH,
    help="Write the comparison as one HTML page, with timelines and memory on common axes.",
)
@FORCE
@standard_options
def compare(output: Output, plans: tuple[Path, ...], html: Path | None, force: bool) -> None:
    """Compare the plans in the folders DIR: their metrics, the parts of their step times, and their
    timelines and memory on common axes.

    Speed-ups and different decisions are relative to the first plan.

    \b
    Example:
      autopipe compare gpt.1f1b.plan gpt.gpipe.plan
      autopipe compare gpt.1f1b.plan gpt.gpipe.plan --html compared.html
    """
    page = None
    if html is not None:
        page = OutputFile(
            html, REPORT, tuple(path for plan in plans for path in plan_inputs(plan)), force
        )
        page.check()
    found = compare_plans(plans, output)
    if page is not None:
        write_texts({page: report_page(compare_report(found.plans, found.diffs))})
    screen = (
        compare_screen(found.plans, found.diffs, output.width, output.coloured)
        if html is None
        else (f"page in {html}",)
    )
    output.result({"plans": found.data, "html": html}, *screen)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One metric of each plan. `best` has the indices of the plans with the best value; it is empty
    if all values are equal or none is better than another.
    """

    name: str
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()


def metric_rows(plans: Sequence[Plan]) -> Iterator[ComparisonRow]:
    """Yield one row per decision or prediction of the plans."""
    summaries = [plan.summary for plan in plans]

    def row(
        name: str, text: Callable[[Summary], str], cost: Callable[[Summary], float] | None = None
    ) -> ComparisonRow:
        """Return a row. The best plans are the one with the minimum `cost` and all plans with the
        same text.
        """
        texts = tuple(map(text, summaries))
        if cost is None or len(set(texts)) == 1:
            return ComparisonRow(name, texts)
        least = text(min(summaries, key=cost))
        return ComparisonRow(
            name, texts, frozenset(place for place, each in enumerate(texts) if each == least)
        )

    def speedup_text(summary: Summary) -> str:
        ratio = speedup(summaries[0], summary)
        return "-" if ratio is None else f"{ratio:.3f}"

    def traffic_text(summary: Summary) -> str:
        moved = summary.communication_bytes
        return "unknown" if moved is None else bytes_text(sum(size for _, size in moved))

    for name in ("strategy", "schedule", "devices", "stages", "depth"):
        yield ComparisonRow(name, tuple(str(getattr(each, name)) for each in summaries))
    if any(each.degrees is not None for each in summaries):
        yield row("degrees", lambda each: "-" if each.degrees is None else each.degrees.text)
    yield row("micro-batches", lambda each: f"{each.micro_batches} of {each.micro_batch_size}")
    equal = len({plan.batch_size for plan in plans}) == 1
    yield row(
        "step",
        lambda each: seconds_text(each.step_time_s),
        (lambda each: each.step_time_s) if equal else None,
    )
    yield row("speed-up", speedup_text)
    yield row(
        "samples/s", lambda each: f"{each.samples_per_s:,.1f}", lambda each: -each.samples_per_s
    )
    units = {each.rate_per_device[1] for each in summaries}
    unit = units.pop() if len(units) == 1 else "samples/s"

    def rate(summary: Summary) -> float:
        return (
            summary.rate_per_device[0]
            if unit == summary.rate_per_device[1]
            else summary.samples_per_s / summary.devices
        )

    yield row(f"{unit} per device", lambda each: number_text(rate(each)), lambda each: -rate(each))
    if any(each.mfu is not None for each in summaries):
        yield row(
            "MFU",
            lambda each: "-" if each.mfu is None else f"{each.mfu:.1%}",
            lambda each: -(each.mfu or 0.0),
        )
    yield row("bubble", lambda each: f"{each.bubble_rate:.1%}", lambda each: each.bubble_rate)
    yield row(
        "peak memory",
        lambda each: bytes_text(max(each.peak_memory_bytes)),
        lambda each: max(each.peak_memory_bytes),
    )
    yield row("communication", traffic_text)
    yield row("lower bound of placement", lambda each: seconds_text(each.lower_bound_s))
    yield row("gap of placement", gap_text)
    yield row(
        "search", lambda each: seconds_text(sum(seconds for _, seconds in each.search_time_s))
    )


_MIN_DIFFERENCE_S = 5e-10
"""Seconds below which a difference is a rounding error."""

STEP_PARTS = tuple(Breakdown(0.0).parts)
"""Names of the parts of a step's time, the ideal time first. Their sum is the step time."""


def breakdown_rows(plans: Sequence[Plan]) -> Iterator[ComparisonRow]:
    """Yield one row per part of the step time, as an average over the devices. Yield nothing if no
    plan has a breakdown.
    """

    def text(seconds: float | None) -> str:
        if seconds is None:
            return "-"
        return seconds_text(seconds) if abs(seconds) >= _MIN_DIFFERENCE_S else "0"

    for name in STEP_PARTS:
        values = [None if each.breakdown is None else each.breakdown.parts[name] for each in plans]
        if any(abs(value or 0.0) >= _MIN_DIFFERENCE_S for value in values):
            yield ComparisonRow(name, tuple(map(text, values)))


_MAX_CHANGES_PER_DECISION = 6
"""Maximum number of changes listed per kind of decision. Changes that affect the most nodes come
first.
"""
_MAX_NODE_ENTRIES = 3


def _change_text(change: Change) -> str:
    named = [
        f"{each[0]} to {each[1]}" if isinstance(each, tuple) else str(each)
        for each in change.entries
    ]
    told = ", ".join(named[:_MAX_NODE_ENTRIES]) + (
        ", ..." if len(named) > _MAX_NODE_ENTRIES else ""
    )
    label = f"{parts_text(change.parts)}: " if change.parts else ""
    return f"{change.before} → {change.after}: {_nodes_text([change])} ({label}{told})"


def _nodes_text(changes: Sequence[Change]) -> str:
    count = sum(len(change.nodes) for change in changes)
    return f"{count} node" if count == 1 else f"{count} {plural(count, 'node')}"


def diff_lines(diff: PlanDiff) -> Iterator[str]:
    """Yield lines for the terminal: the largest changes of each kind, and the number of further
    changes.
    """
    if diff.same:
        yield "the same decisions"
    elif not diff.known:
        yield "nodes cannot be compared: a model is not at its place, has changed, or is another"
    elif not diff.changes:
        yield "the same placement" + (", tasks in another order" if diff.orders else "")
    for what, changes in diff.changes:
        yield f"{what} of {_nodes_text(changes)}"
        yield from (f"  {_change_text(change)}" for change in changes[:_MAX_CHANGES_PER_DECISION])
        rest = changes[_MAX_CHANGES_PER_DECISION:]
        if rest:
            ways = f"{len(rest)} other ways" if len(rest) > 1 else "another way"
            yield f"  {_nodes_text(rest)} in {ways}"


def compare_screen(
    plans: Sequence[ComparisonPlan], diffs: Sequence[PlanDiff], width: int, colour: bool
) -> Iterator[RenderableType]:
    bare = [each.plan for each in plans]
    yield _comparison_table("", plans, metric_rows(bare))
    parts = list(breakdown_rows(bare))
    if parts:
        yield ""
        yield _comparison_table("step, by what it goes to", plans, parts)
    for each, diff in zip(plans[1:], diffs[1:], strict=True):
        yield ""
        yield f"{each} against {plans[0]}:"
        yield from (f"  {line}" for line in diff_lines(diff))
    steps = [each.named_picture for each in plans]
    yield ""
    yield from draw_timelines(steps, width, colour)
    yield ""
    yield from draw_memories(steps, width, colour)


def _comparison_table(
    head: str, plans: Sequence[ComparisonPlan], rows: Iterable[ComparisonRow]
) -> Table:
    table = plain_table(head, *map(str, plans))
    for row in rows:
        cells = (
            Text(text, "bold green" if place in row.best else "")
            for place, text in enumerate(row.texts)
        )
        table.add_row(row.name, *cells)
    return table


_PART_HUES = (213, 4, 30, 138, 174, 96, 330, 53, 246, 290, 15, 195)
"""Hues of the parts of a step, in their order."""


def compare_report(plans: Sequence[ComparisonPlan], diffs: Sequence[PlanDiff]) -> Report:
    bare = [each.plan for each in plans]
    sections = [("Figures", _markup_rows(plans, metric_rows(bare)))]
    parts = list(breakdown_rows(bare))
    if parts:
        markup = _step_bars(plans) + _markup_rows(plans, parts)
        sections.append(("What a step's time goes to, on average over the devices", markup))
    if len(plans) > 1:
        pairs = zip(plans[1:], ("\n".join(diff_lines(diff)) for diff in diffs[1:]), strict=True)
        markup = "".join(
            f"<h3>{escape(str(each))}</h3><pre>{escape(lines)}</pre>" for each, lines in pairs
        )
        sections.append((f"Decided otherwise than in {plans[0]}", markup))
    subtitle = ", ".join(dict.fromkeys(plan.model for plan in bare))
    if any(plan.summary.devices > MOST_DEVICES for plan in bare):
        subtitle += "; of devices with the same tasks one is drawn"
    pictures = tuple(each.named_picture for each in plans)
    return Report(
        title=f"{len(plans)} {plural(len(plans), 'plan')} compared",
        subtitle=subtitle,
        figures=tuple((str(each), seconds_text(each.plan.summary.step_time_s)) for each in plans),
        pictures=pictures,
        sections=tuple(sections),
        legend=legend_markup([picture for _, picture in pictures]),
    )


def _markup_rows(plans: Sequence[ComparisonPlan], rows: Iterable[ComparisonRow]) -> str:
    marked = []
    for row in rows:
        marks = (' class="best"' if place in row.best else "" for place in range(len(row.texts)))
        cells = (
            f"<td{mark}>{escape(text)}</td>" for mark, text in zip(marks, row.texts, strict=True)
        )
        marked.append(f"<tr><td>{escape(row.name)}</td>{''.join(cells)}</tr>")
    return f'<div class="compared">{markup_table(("", *map(str, plans)), marked)}</div>'


def _step_bars(plans: Sequence[ComparisonPlan]) -> str:
    """Return the markup of one bar per step, which shows its parts. All bars have one scale. A
    legend explains the colours.
    """
    longest = max(each.plan.summary.step_time_s for each in plans)
    colours = {
        name: f"hsl({_PART_HUES[index % len(_PART_HUES)]} 60% 55%)"
        for index, name in enumerate(STEP_PARTS)
    }
    lines = []
    drawn = set()
    for each in plans:
        breakdown = each.plan.breakdown
        if breakdown is None:
            continue
        pieces = []
        for name, colour in colours.items():
            seconds = breakdown.parts[name]
            if seconds > 0 and longest:
                drawn.add(name)
                title = escape(f"{name}: {seconds_text(seconds)}")
                width = 100 * seconds / longest
                pieces.append(
                    f'<i title="{title}" style="width:{width:.3f}%;background:{colour}"></i>'
                )
        lines.append(f"<div>{escape(str(each))}</div><div>{''.join(pieces)}</div>")
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
        if name in drawn
    )
    return f'<div class="parts">{"".join(lines)}</div><p class="legend">{legend}</p>'
