"""The DAG of stages as SVG."""

from __future__ import annotations

from html import escape

from autopipe.cli.drawing.palette import stage_colour
from autopipe.cli.figures import bytes_text, devices_text
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase

_WIDTH, _HEIGHT, _ACROSS, _DOWN = 104, 40, 64, 18


def stage_graph_svg(plan: Plan) -> str:
    """Stages from left to right by their distance from the start; edges say what one micro-batch sends along them."""
    sent: dict[tuple[int, int], int] = {}
    for message in plan.prediction.messages:
        edge = message.source_stage, message.target_stage
        sent[edge] = sent.get(edge, 0) + message.forward_bytes
    places = _places(len(plan.placement.stages), sorted(sent))
    width = max(x for x, _ in places) + _WIDTH + 8
    height = max(y for _, y in places) + _HEIGHT + 20
    parts = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    parts.append('<title>stages and what they send</title><defs><marker id="tip-of-edge" viewBox="0 0 8 8" refX="8"')
    parts.append('refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>')
    for (source, target), size in sorted(sent.items()):
        parts.append(_edge(places[source], places[target], bytes_text(size)))
    for index, (stage, (x, y)) in enumerate(zip(plan.placement.stages, places, strict=True)):
        colour = stage_colour(index, Phase.FORWARD)
        devices = escape(_shortened(devices_text(stage.devices)))
        parts.append(f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{colour}"/>')
        parts.append(f'<text class="name" x="{x + 8}" y="{y + 17}">stage {index}</text>')
        parts.append(f'<text class="name" x="{x + 8}" y="{y + 32}">device {devices}</text>')
    return "".join([*parts, "</svg>"])


def _places(stages: int, edges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Left upper corner of each stage: columns by longest way from a start, rows in order of index."""
    column = [0] * stages
    for source, target in edges:
        column[target] = max(column[target], column[source] + 1)
    rows: dict[int, int] = {}
    places = []
    for stage in range(stages):
        row = rows.get(column[stage], 0)
        rows[column[stage]] = row + 1
        places.append((4 + column[stage] * (_WIDTH + _ACROSS), 16 + row * (_HEIGHT + _DOWN)))
    return places


def _edge(source: tuple[int, int], target: tuple[int, int], label: str) -> str:
    left, top = source[0] + _WIDTH, source[1] + _HEIGHT // 2
    right, bottom = target[0], target[1] + _HEIGHT // 2
    middle = (left + right) / 2
    long = right - left > _ACROSS
    # An edge that passes over other stages goes above them.
    path = f"M{left} {top}C{middle} {top - 60 * long} {middle} {bottom - 60 * long} {right} {bottom}"
    place = f'x="{middle}" y="{(top + bottom) / 2 - 5 - 45 * long}"'
    return (
        f'<path class="edge" d="{path}" marker-end="url(#tip-of-edge)"/>'
        f'<text class="size" {place} text-anchor="middle">{escape(label)}</text>'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 8 else text[:7] + "…"
