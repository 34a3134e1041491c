"""A plan as one self-contained page: timeline and memory to zoom into, stage graph, predictions, stages."""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from autopipe.cli.drawing.palette import stage_colour
from autopipe.cli.drawing.stage_graph import stage_graph_svg
from autopipe.cli.drawing.steady import steady_state
from autopipe.cli.figures import bytes_text, devices_text, seconds_text
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import Timeline

_MOST_TRANSFERS = 20_000
"""Messages that a page holds; of a step with more, none are drawn."""


def report_page(plan: Plan, timeline: Timeline) -> str:
    """HTML that loads nothing from anywhere: its security policy forbids that."""
    summary = plan.summary
    title = f"{plan.model.rpartition('/')[2]}: {summary.strategy} with {summary.schedule}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{_asset("report.css")}
</style>
</head>
<body>
<header><h1>{escape(title)}</h1>
<p>{escape(plan.model)}</p></header>
<section class="figures">{_figures(plan)}</section>
<section><h2>Timeline</h2>
<p class="tools"><button id="nearer" title="zoom in (+)">+</button> <button id="farther" title="zoom out (-)">−</button>
<button id="all" title="show all (0)">all</button> <span id="range"></span>
<span class="quiet">scroll over the timeline to zoom, drag to move</span></p>
<div id="frame"><canvas id="timeline" tabindex="0" aria-label="timeline of a step"></canvas>
<div id="tip" hidden></div></div></section>
<section><h2>Stages</h2><div class="graph">{stage_graph_svg(plan)}</div>{_stages(plan)}</section>
<section><h2>Search</h2>{_search(plan)}</section>
<script type="application/json" id="data">{_embedded(_data(plan, timeline))}</script>
<script>
{_asset("report.js")}
</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _embedded(data: object) -> str:
    """JSON that can stand in a page: no text of it can end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(plan: Plan, timeline: Timeline) -> dict[str, object]:
    phases = [phase.value for phase in Phase]
    state = steady_state(plan.schedule, timeline)
    transfers = timeline.transfers if len(timeline.transfers) <= _MOST_TRANSFERS else ()
    return {
        "end": timeline.end,
        "phases": phases,
        "colours": [
            [stage_colour(stage, Phase.FORWARD), stage_colour(stage, Phase.BACKWARD)]
            for stage in range(len(plan.placement.stages))
        ],
        "spans": [
            [
                span.device,
                span.task.stage,
                phases.index(span.task.phase.value),
                span.task.micro_batch,
                span.start,
                span.end,
            ]
            for span in timeline.spans
        ],
        "transfers": [
            [each.source, each.target, each.start, each.end, each.bytes, str(each.task)] for each in transfers
        ],
        "memory": [[list(point) for point in curve] for curve in timeline.memory],
        "steady": None if state is None else [state.start, state.end, state.count],
    }


def _figures(plan: Plan) -> str:
    summary = plan.summary
    figures = (
        ("step", seconds_text(summary.step_time_s)),
        ("samples a second", f"{summary.samples_per_s:,.1f}"),
        ("at best", seconds_text(summary.lower_bound_s)),
        ("bubble", f"{summary.bubble_rate:.1%}"),
        ("peak memory", bytes_text(max(summary.peak_memory_bytes))),
        ("devices", str(summary.devices)),
        ("stages", f"{summary.stages}, depth {summary.depth}"),
        ("micro-batches", f"{summary.micro_batches} of {summary.micro_batch_size}"),
        ("mode", plan.mode),
    )
    return "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures)


def _stages(plan: Plan) -> str:
    heads = (
        "stage",
        "devices",
        "nodes",
        "parameters",
        "forward",
        "backward",
        "gradient sum",
        "update",
        "kept a micro-batch",
        "static memory",
        "recompute",
    )
    rows = []
    for index, (stage, predicted) in enumerate(zip(plan.placement.stages, plan.prediction.stages, strict=True)):
        colour = stage_colour(index, Phase.BACKWARD)
        cells = (
            devices_text(stage.devices),
            str(len(stage.nodes)),
            bytes_text(predicted.parameter_bytes),
            seconds_text(predicted.forward_s),
            seconds_text(predicted.backward_s),
            seconds_text(predicted.gradient_s),
            seconds_text(predicted.update_s),
            bytes_text(predicted.kept_bytes),
            bytes_text(predicted.static_bytes),
            "yes" if stage.recompute else "no",
        )
        first = f'<td><i style="background:{colour}"></i>{index}</td>'
        rows.append(f"<tr>{first}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return _table(heads, rows)


def _search(plan: Plan) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td>{escape(seconds_text(seconds))}</td></tr>"
        for name, seconds in plan.summary.search_time_s
    ]
    return _table(("pass", "time"), rows)


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
