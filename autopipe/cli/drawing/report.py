"""A step as one self-contained page: timeline and memory to zoom into, and what is told beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from autopipe.cli.drawing.markup import escape
from autopipe.cli.drawing.palette import stage_colour, text_colour
from autopipe.cli.drawing.picture import Bar, Picture
from autopipe.ir.timeline import Transfer

_MOST_TRANSFERS = 20_000
"""Messages that a page holds; of a step with more, none are drawn."""


@dataclass(frozen=True, slots=True)
class Report:
    """A page. `sections` are a heading and markup each, in which every text is escaped already."""

    title: str
    subtitle: str
    figures: tuple[tuple[str, str], ...]
    """(name, value)."""
    pictures: tuple[tuple[str, Picture], ...]
    """Pictures drawn on one time axis, each with its name; one alone needs none."""
    sections: tuple[tuple[str, str], ...]


def report_page(report: Report) -> str:
    """HTML that loads nothing from anywhere: its security policy forbids that."""
    figures = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in report.figures)
    sections = "\n".join(f"<section><h2>{escape(name)}</h2>{markup}</section>" for name, markup in report.sections)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(report.title)}</title>
<style>
{_asset("report.css")}
</style>
</head>
<body>
<header><h1>{escape(report.title)}</h1>
<p>{escape(report.subtitle)}</p></header>
<section class="figures">{figures}</section>
<section><h2>Timeline</h2>
<p class="tools"><button id="nearer" title="zoom in (+)">+</button> <button id="farther" title="zoom out (-)">−</button>
<button id="all" title="show all (0)">all</button> <button id="repetend" title="show the repetend (r)">repetend</button>
<span id="range"></span>
<span class="quiet">scroll over the timeline to zoom, drag to move; + − 0 r and the arrows work too</span></p>
<div id="frame"><canvas id="timeline" tabindex="0" aria-label="timeline of a step"></canvas>
<div id="tip" hidden></div></div></section>
{sections}
<script type="application/json" id="data">{_embedded(_data(report.pictures))}</script>
<script>
(() => {{
"use strict";
{_asset("axis.js")}
{_asset("timeline.js")}
{_asset("pointer.js")}
}})();
</script>
</body>
</html>
"""
    # A name from JSON may hold half of a letter, which no file can.
    return page.encode("utf-8", "replace").decode("utf-8")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _embedded(data: object) -> str:
    """JSON that can stand in a page: no text of it can end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(named: Sequence[tuple[str, Picture]]) -> dict[str, object]:
    """Data for the page's script: each device's bars and memory as flat lists of numbers, which parse fast."""
    pictures = [picture for _, picture in named]
    kinds: dict[tuple[object, ...], int] = {}
    bars: list[list[float]] = []
    transfers: list[tuple[object, ...]] = []
    for picture in pictures:
        first = len(bars)
        bars += ([] for _ in picture.memory)
        for bar in picture.bars:
            kind = kinds.setdefault(_kind(bar), len(kinds))
            bars[first + bar.device] += (kind, bar.unit, _short(bar.start), _short(bar.end))
        transfers += (_transfer(each, first) for each in picture.transfers)
    state = pictures[0].steady if len(pictures) == 1 else None
    return {
        "end": max(picture.end for picture in pictures),
        "physical": pictures[0].physical,
        "groups": [(name, len(picture.memory), picture.end) for name, picture in named],
        "devices": [picture.device_of(row) for picture in pictures for row in range(len(picture.memory))],
        "kinds": list(kinds),
        "bars": bars,
        "memory": [
            [number for time, used in curve for number in (_short(time), used)]
            for picture in pictures
            for curve in picture.memory
        ],
        "limits": [limit for picture in pictures for limit in picture.limits],
        "transfers": transfers if len(transfers) <= _MOST_TRANSFERS else [],
        "steady": None if state is None else [state.start, state.end, state.count],
    }


def _transfer(each: Transfer, first: int) -> tuple[object, ...]:
    """A message between rows, of which the picture's own begin with `first`."""
    return first + each.source, first + each.target, _short(each.start), _short(each.end), each.bytes, str(each.task)


def _kind(bar: Bar) -> tuple[object, ...]:
    """Common part of the bars of a stage and phase: name and letter before the micro-batch, phase, colours, stage."""
    return (
        bar.name.removesuffix(str(bar.unit)),
        bar.letter,
        bar.phase.name.replace("_", " ").lower(),
        stage_colour(bar.stage, bar.phase),
        text_colour(bar.phase),
        bar.stage,
    )


def _short(time: float) -> float:
    """Ten digits: a nanosecond of ten seconds."""
    return time if isinstance(time, int) else float(f"{time:.10g}")
