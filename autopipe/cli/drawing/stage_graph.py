"""A DAG as SVG: the stages of a plan, or the blocks of a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.cli.drawing.block_picture import block_kinds
from autopipe.cli.drawing.markup import escape
from autopipe.cli.drawing.palette import stage_colour
from autopipe.cli.figures import bytes_text, devices_text
from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase

_WIDTH, _HEIGHT, _ACROSS, _DOWN = 104, 40, 64, 18
_LETTERS = 13
"""Letters that fit into a box."""


@dataclass(frozen=True, slots=True)
class Node:
    """A box with two lines."""

    name: str
    devices: tuple[int, ...]
    colour: str
    ink: str = "#10131a"


def plan_graph_svg(plan: Plan) -> str:
    """The stages; edges say what one micro-batch sends along them."""
    sent: dict[tuple[int, int], int] = {}
    for message in plan.prediction.messages:
        edge = message.source_stage, message.target_stage
        sent[edge] = sent.get(edge, 0) + message.forward_bytes
    nodes = [
        Node(f"stage {index}", stage.devices, stage_colour(index, Phase.FORWARD))
        for index, stage in enumerate(plan.placement.stages)
    ]
    return _graph_svg("stages and what they send", nodes, {edge: bytes_text(size) for edge, size in sent.items()})


def block_graph_svg(graph: BlockGraph) -> str:
    """The blocks of a unit, and which comes after which."""
    nodes = [
        Node(block.name, block.devices, stage_colour(stage, phase), "#ffffff" if phase is Phase.BACKWARD else "#10131a")
        for block, (stage, phase, _) in zip(graph.blocks, block_kinds(graph.blocks), strict=True)
    ]
    edges = {
        (source, target): f"+{block.delay(place)}" if block.delay(place) else ""
        for target, block in enumerate(graph.blocks)
        for place, source in enumerate(block.after)
    }
    return _graph_svg("the blocks of a unit", nodes, edges)


def _graph_svg(title: str, nodes: Sequence[Node], edges: Mapping[tuple[int, int], str]) -> str:
    """Nodes from left to right by their distance from a start; labels on the edges."""
    places = _places(len(nodes), sorted(edges))
    width = max(x for x, _ in places) + _WIDTH + 8
    height = max(y for _, y in places) + _HEIGHT + 20
    parts = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    parts.append(f'<title>{escape(title)}</title><defs><marker id="tip-of-edge" viewBox="0 0 8 8" refX="8"')
    parts.append('refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>')
    for (source, target), label in sorted(edges.items()):
        parts.append(_edge(places[source], places[target], label))
    for node, (x, y) in zip(nodes, places, strict=True):
        devices = escape(_shortened(f"device {devices_text(node.devices)}"))
        style = f'style="fill:{node.ink}"'
        parts.append(f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{node.colour}"/>')
        parts.append(f'<text {style} x="{x + 8}" y="{y + 17}">{escape(_shortened(node.name))}</text>')
        parts.append(f'<text {style} x="{x + 8}" y="{y + 32}">{devices}</text>')
    return f'<div class="graph">{"".join([*parts, "</svg>"])}</div>'


def _places(nodes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Left upper corner of each node: columns by longest way from a start, rows near those of the nodes before."""
    before: list[list[int]] = [[] for _ in range(nodes)]
    for source, target in edges:
        before[target].append(source)
    columns = _columns(before)
    rows: dict[int, int] = {}
    for column in range(max(columns) + 1):
        members = [node for node in range(nodes) if columns[node] == column]
        members.sort(key=lambda node: (min((rows[other] for other in before[node]), default=node), node))
        rows.update((node, row) for row, node in enumerate(members))
    return [(4 + columns[node] * (_WIDTH + _ACROSS), 16 + rows[node] * (_HEIGHT + _DOWN)) for node in range(nodes)]


def _columns(before: Sequence[Sequence[int]]) -> list[int]:
    """Nodes on the longest way that leads to each; an edge may lead to a smaller index."""
    columns = [0] * len(before)
    changed = True
    while changed:
        changed = False
        for node, others in enumerate(before):
            column = max((columns[other] + 1 for other in others), default=0)
            changed = changed or column != columns[node]
            columns[node] = column
    return columns


def _edge(source: tuple[int, int], target: tuple[int, int], label: str) -> str:
    left, top = source[0] + _WIDTH, source[1] + _HEIGHT // 2
    right, bottom = target[0], target[1] + _HEIGHT // 2
    middle = (left + right) / 2
    long = right - left > _ACROSS
    # An edge that passes over other nodes goes above them.
    path = f"M{left} {top}C{middle} {top - 60 * long} {middle} {bottom - 60 * long} {right} {bottom}"
    place = f'x="{middle}" y="{(top + bottom) / 2 - 5 - 45 * long}"'
    return (
        f'<path class="edge" d="{path}" marker-end="url(#tip-of-edge)"/>'
        f'<text class="size" {place} text-anchor="middle">{escape(label)}</text>'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"
