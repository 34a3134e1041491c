"""HTML reports of a step or of a schedule of blocks: zoomable timeline and memory, stages or
blocks, and a comparison of schedules. A report is one self-contained file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from autopipe.api.summary_text import number_text
from autopipe.api.timeline_figure import (
    END_STYLES,
    Picture,
    block_kinds,
    block_picture,
    legend_of,
    plan_picture,
    stage_colour,
    text_colour,
)
from autopipe.cli.drawing.svg import (
    block_graph_svg,
    escape,
    markup_row,
    markup_table,
    plan_graph_svg,
)
from autopipe.cli.plan_report import gap_text, stage_columns, strategy_text, text_over_chosen
from autopipe.ir.block_schedule import BlockSchedule
from autopipe.ir.placement import devices_text
from autopipe.ir.plan import Breakdown, Plan, Summary, best_per_strategy
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import StepEndSpan, Timeline
from autopipe.ir.words import bytes_text, seconds_text

if TYPE_CHECKING:
    from autopipe.api.showing import ScheduleResult

_MIN_LISTED_FRACTION = 5e-4
"""Fraction of a step below which a part has no row."""
_MAX_DRAWN_TRANSFERS = 20_000
"""Maximum number of messages in a report. If a step has more, none are drawn."""


@dataclass(frozen=True, slots=True)
class Report:
    """Contents of a report. `sections` are pairs of a heading and markup, in which all text is
    escaped.
    """

    title: str
    subtitle: str
    figures: tuple[tuple[str, str], ...]
    """Pairs of a name and a value."""
    pictures: tuple[tuple[str, Picture], ...]
    """Figures on one time axis, each with its name. The name may be empty if there is only one."""
    sections: tuple[tuple[str, str], ...]
    legend: str = ""
    """Markup below the timeline that explains its colours and letters."""


def report_page(report: Report) -> str:
    """Return the HTML of a report. Its content security policy forbids it to load other
    resources.
    """
    figures = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in report.figures
    )
    sections = "\n".join(
        f"<section><h2>{escape(name)}</h2>{markup}</section>" for name, markup in report.sections
    )
    # The characters &, < and > are escaped, so that no text in the data can end the HTML element
    # that contains it.
    data = json.dumps(_report_data(report.pictures), allow_nan=False, separators=(",", ":"))
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="autopipe">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(report.title)}</title>
<style>
{_read_asset("report.css")}
</style>
</head>
<body>
<header><h1>{escape(report.title)}</h1>
<p>{escape(report.subtitle)}</p></header>
<section class="figures">{figures}</section>
<section><h2>Timeline</h2>
<p class="tools"><button id="nearer" title="zoom in (+)">+</button> \
<button id="farther" title="zoom out (-)">−</button>
<button id="all" title="show all (0)">all</button>
<button id="repetend" title="show the steady state (r)">steady state</button>
<span id="range"></span>
<span class="quiet">scroll over the timeline to zoom, drag to move; + − 0 r and the arrows work \
too</span></p>
<div id="frame"><canvas id="timeline" tabindex="0" aria-label="timeline of a step"></canvas>
<div id="tip" hidden></div></div>
{report.legend}</section>
{sections}
<script type="application/json" id="data">{data}</script>
<script>
(() => {{
"use strict";
{_read_asset("axis.js")}
{_read_asset("timeline.js")}
{_read_asset("pointer.js")}
}})();
</script>
</body>
</html>
"""
    # A name from JSON may have an unpaired surrogate, which UTF-8 cannot encode, so a question mark
    # replaces it.
    return page.encode("utf-8", "replace").decode("utf-8")


def _read_asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _report_data(named: Sequence[tuple[str, Picture]]) -> dict[str, object]:
    """Return the data for the script of the report: bars and memory of each device as flat lists of
    numbers, which a browser parses fast.
    """
    pictures = [picture for _, picture in named]
    kinds: dict[tuple[object, ...], int] = {}
    bars: list[list[float]] = []
    transfers: list[tuple[object, ...]] = []
    for picture in pictures:
        first = len(bars)
        bars += ([] for _ in picture.memory)
        for bar in picture.bars:
            # Bars of one stage and phase share a name and a colour, which are stored once.
            stem = bar.name.removesuffix(str(bar.unit))
            phase = bar.phase.name.replace("_", " ").lower()
            colours = stage_colour(bar.stage, bar.phase), text_colour(bar.phase)
            kind = kinds.setdefault((stem, bar.letter, phase, *colours, bar.stage), len(kinds))
            bars[first + bar.device] += (
                kind,
                bar.unit,
                _round_time(bar.start),
                _round_time(bar.end),
            )
        for each in picture.transfers:
            times = _round_time(each.start), _round_time(each.end)
            transfers.append(
                (first + each.source, first + each.target, *times, each.bytes, str(each.task))
            )
    ends = [_end_spans_as_numbers(row) for picture in pictures for row in picture.end_rows]
    state = pictures[0].steady if len(pictures) == 1 else None
    curves = [curve for picture in pictures for curve in picture.memory]
    return {
        "end": max(picture.end for picture in pictures),
        "physical": pictures[0].physical,
        "groups": [(name, len(picture.memory), picture.end) for name, picture in named],
        "devices": [
            picture.device_of(row) for picture in pictures for row in range(len(picture.memory))
        ],
        "kinds": list(kinds),
        "bars": bars,
        "endKinds": [
            (kind.value, style.letter, style.fill, style.ink) for kind, style in END_STYLES.items()
        ],
        "ends": ends,
        "memory": [
            [number for time, used in curve for number in (_round_time(time), used)]
            for curve in curves
        ],
        "limits": [limit for picture in pictures for limit in picture.limits],
        "transfers": transfers if len(transfers) <= _MAX_DRAWN_TRANSFERS else [],
        "steady": None if state is None else [state.start, state.end, state.count],
    }


def _end_spans_as_numbers(row: Sequence[StepEndSpan]) -> list[float]:
    """Return kind, stage (-1 for all stages), start and end of each span of a row, as one flat
    list.
    """
    kinds = list(END_STYLES)
    found: list[float] = []
    for span in row:
        stage = -1 if span.stage is None else span.stage
        found += (kinds.index(span.kind), stage, _round_time(span.start), _round_time(span.end))
    return found


def _round_time(time: float) -> float:
    """Round a time to ten significant digits: a nanosecond in ten seconds."""
    return time if isinstance(time, int) else float(f"{time:.10g}")


def comparison_markup(
    results: Sequence[ScheduleResult],
    limits: Sequence[int | None],
    time_text: Callable[[float], str],
    memory_text: Callable[[float], str],
) -> str:
    """Return a table with one row per schedule, the shortest step first. The chosen schedule is
    marked. Schedules that do not support the placement follow at the end.
    """
    taken = sorted(
        (each for each in results if each.peak_memory), key=lambda each: (each.time, each.schedule)
    )
    chosen = next((each.time for each in taken if each.chosen), None)
    slowest = max((each.time for each in taken), default=0.0)
    rows = []
    for each in taken:
        width = round(160 * each.time / slowest) if slowest else 0
        over = any(
            limit is not None and peak > limit
            for peak, limit in zip(each.peak_memory, limits, strict=True)
        )
        cells = (
            time_text(each.time),
            f"{each.time / chosen:.3f}" if chosen else "-",
            f"{each.bubble_rate:.1%}",
            memory_text(max(each.peak_memory)) + (", over the limit" if over else ""),
        )
        name = escape(f"{each.schedule} (chosen)" if each.chosen else each.schedule)
        bar = f'<td class="share"><i style="width:{width}px"></i></td>'
        others = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        mark = ' class="chosen"' if each.chosen else ""
        rows.append(f"<tr{mark}><td>{name}</td>{bar}{others}</tr>")
    for each in results:
        if not each.peak_memory:
            why = f'<td class="why" colspan="5">{escape(each.refusal)}</td>'
            rows.append(f'<tr class="refused"><td>{escape(each.schedule)}</td>{why}</tr>')
    return markup_table(("schedule", "", "time", "to the chosen", "bubble", "peak memory"), rows)


def legend_markup(pictures: Sequence[Picture]) -> str:
    """Return the markup of the legend: the colours and letters of the phases, the work at the end
    of the step, and the stages in `pictures`.
    """
    legend = legend_of(pictures)
    entries = "".join(
        f'<span><i style="background:{colour}"></i>{escape(text)}</span>'
        for colour, text in legend.entries
    )
    more = f"<span>{legend.more}</span>" if legend.more else ""
    how = (
        "a task is its stage, its letter and its micro-batch: 2F3; the line below a device is its "
        "memory"
    )
    return f'<p class="legend">{entries}{more}<span>{how}</span></p>'


_PART_DESCRIPTIONS = {
    "ideal": "linear speed-up at the roofline",
    "bubble": "the busiest device waits for others",
    "imbalance": "devices have less to do than the busiest",
    "exposed P2P": "send and receive between stages that no computation hides",
    "collectives": "inside stages, where operators are split",
    "gradients": "summed at the step's end",
    "recomputation": "forwards run again",
    "redundant compute": "operators that several devices compute for the same samples",
    "update": "the optimizer, above a device's share",
    "launch overhead": "launches of kernels and starts of tasks",
    "host": "the device waits for the host to start operators",
}


def breakdown_markup(breakdown: Breakdown) -> str:
    """Return a table with one row per part of the step, with a bar for its fraction of the step."""
    rows = []
    step_s = breakdown.step_s
    for name, seconds in (("ideal", breakdown.ideal_s), *breakdown.losses):
        if step_s and abs(seconds) >= _MIN_LISTED_FRACTION * step_s:
            bar = (
                '<td class="share"><i '
                f'style="width:{max(0, round(160 * seconds / step_s))}px"></i></td>'
            )
            others = "".join(
                f"<td>{cell}</td>" for cell in (seconds_text(seconds), f"{seconds / step_s:.1%}")
            )
            others += f'<td class="note">{escape(_PART_DESCRIPTIONS.get(name, ""))}</td>'
            rows.append(f"<tr><td>{escape(name)}</td>{bar}{others}</tr>")
    return markup_table(("part of the step", "", "time", "share", ""), rows)


def candidates_markup(plan: Plan) -> str:
    """Return a table with the best candidate of each strategy. The chosen one is marked. Strategies
    without a plan have the reason.
    """
    rows = []
    chosen_s = plan.summary.step_time_s
    for place, each in enumerate(best_per_strategy(plan.alternatives)):
        name = escape(strategy_text(each))
        if each.step_time_s is None:
            why = f'<td class="why" colspan="6">{escape(each.refused or "")}</td>'
            rows.append(f'<tr class="refused"><td>{name}</td>{why}</tr>')
            continue
        cells = (
            each.choice.schedule or "any",
            str(each.micro_batches),
            seconds_text(each.step_time_s),
            text_over_chosen(each.step_time_s, chosen_s),
            "-" if each.lower_bound_s is None else seconds_text(each.lower_bound_s),
            "-" if each.peak_memory_bytes is None else bytes_text(each.peak_memory_bytes),
        )
        mark = "" if place else ' class="chosen"'
        rows.append(
            f"<tr{mark}><td>{name}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        )
    heads = (
        "strategy",
        "schedule",
        "micro-batches",
        "step",
        "slowdown",
        "lower bound of placement",
        "memory",
    )
    return markup_table(heads, rows)


def _device_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the processing rate per device, and the MFU if it is known."""
    rate, unit = summary.rate_per_device
    yield f"{unit} per device", number_text(rate)
    if summary.mfu is not None:
        yield "MFU", f"{summary.mfu:.1%}"


def plan_report(plan: Plan, timeline: Timeline, results: Sequence[ScheduleResult]) -> Report:
    summary = plan.summary
    picture = plan_picture(plan, timeline)
    columns = stage_columns(plan, full=True)
    rows = enumerate(zip(*columns.values(), strict=True))
    stages = [markup_row(cells, stage_colour(index, Phase.BACKWARD)) for index, cells in rows]
    sections = [("Stages", plan_graph_svg(plan) + markup_table(list(columns), stages))]
    if plan.breakdown is not None:
        sections.append(("Where the step goes", breakdown_markup(plan.breakdown)))
    if plan.alternatives:
        sections.append(("Candidates, the best of each strategy", candidates_markup(plan)))
    if results:
        table = comparison_markup(results, picture.limits, seconds_text, bytes_text)
        sections.append(("This placement under every schedule", table))
    passes = [markup_row((name, seconds_text(seconds))) for name, seconds in summary.search_time_s]
    sections.append(("Search", markup_table(("pass", "time"), passes)))
    return Report(
        title=f"{plan.model.rpartition('/')[2]}: {summary.strategy} with {summary.schedule}",
        subtitle=f"{plan.model}: {summary.degrees.text}"
        if summary.degrees is not None
        else plan.model,
        figures=(
            ("step", seconds_text(summary.step_time_s)),
            ("samples a second", f"{summary.samples_per_s:,.1f}"),
            *_device_figures(summary),
            ("lower bound for this placement", seconds_text(summary.lower_bound_s)),
            ("gap to optimal for this placement", gap_text(summary)),
            ("bubble", f"{summary.bubble_rate:.1%}"),
            ("peak memory", bytes_text(max(summary.peak_memory_bytes))),
            ("devices", str(summary.devices)),
            (f"stages, depth {summary.depth}", str(summary.stages)),
            ("micro-batches", f"{summary.micro_batches} of {summary.micro_batch_size}"),
            ("mode", plan.mode),
        ),
        pictures=(("", picture),),
        sections=tuple(sections),
        legend=legend_markup([picture]),
    )


def block_report(
    schedule: BlockSchedule, title: str, subtitle: str, results: Sequence[ScheduleResult]
) -> Report:
    """Return the report of a schedule of blocks. It compares schedules only if there are results of
    other schedules.
    """
    graph = schedule.graph
    steady = schedule.steady_bubble_rate
    offsets = schedule.repetend.offsets if schedule.repetend is not None else None
    rows = []
    for index, (block, (stage, phase, _)) in enumerate(
        zip(graph.blocks, block_kinds(graph.blocks), strict=True)
    ):
        cells = (
            block.name,
            devices_text(block.devices),
            str(block.time),
            f"{block.memory:+d}" if block.memory else "0",
            ", ".join(graph.blocks[other].name for other in block.after) or "-",
            "-" if offsets is None else str(offsets[index]),
        )
        rows.append(markup_row(cells, stage_colour(stage, phase)))
    blocks = markup_table(
        ("block", "devices", "time", "memory", "after", "unit in the repetend"), rows
    )
    sections = [("Blocks", block_graph_svg(graph) + blocks)]
    if results:
        table = comparison_markup(results, graph.memory, "{:g}".format, "{:g}".format)
        sections.append(("These blocks under every schedule", table))
    return Report(
        title=title,
        subtitle=subtitle,
        figures=(
            ("makespan", str(schedule.makespan)),
            ("period", "none" if schedule.period is None else str(schedule.period)),
            ("no less than", str(schedule.lower_bound)),
            ("gap", "proven optimal" if schedule.optimal else f"{schedule.gap:.1%}"),
            ("bubble in the steady state", "-" if steady is None else f"{steady:.1%}"),
            ("peak memory", str(max(schedule.peak_memory))),
            ("micro-batches", str(schedule.units * graph.micro_batches_per_unit)),
            ("devices", str(graph.devices)),
            ("search", f"{schedule.search_time_s:.2f} s"),
        ),
        pictures=(("", block_picture(schedule, title)),),
        sections=tuple(sections),
    )
