"""SVG for light and dark pages: the timeline of a step, a DAG of stages or blocks, a scatter plot; and HTML tables."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape as html_escape

from autopipe.cli.drawing.picture import Bar, Picture, SteadyState, block_kinds, stage_colour, text_colour
from autopipe.cli.output import bytes_text, devices_text, printable_lines
from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase


def escape(text: str) -> str:
    """`text` as it stands in markup, its control characters shown: XML may not hold them."""
    return html_escape(printable_lines(text))


def markup_table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table that scrolls sideways where it is too wide; `rows` are markup."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def markup_row(cells: Sequence[str], colour: str | None = None) -> str:
    """A row of a table, its texts escaped; `colour` marks the first cell."""
    mark = f'<i style="background:{colour}"></i>' if colour else ""
    first, *others = (escape(cell) for cell in cells)
    return f"<tr><td>{mark}{first}</td>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"


_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 74, 84, 34
_ROW, _BOX = 30, 24
_LETTER = 6.2
"""Width of a letter of the labels."""
_STYLE = (
    "text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#24292f}"
    ".quiet{fill:#6e7781}.lane{fill:#f3f4f6}.rule{stroke:#8c959f;fill:none}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9198a1}.lane{fill:#1c2129}}"
)


def timeline_svg(picture: Picture) -> str:
    """One row a device: its tasks in the stages' colours, numbered by micro-batch, and its peak memory."""
    devices = len(picture.memory)
    state = picture.steady
    height = _TOP + devices * _ROW + (46 if state else 26)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(picture.title)}</title><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="18">{escape(picture.title)}</text>',
        *_lanes(picture),
        *(_box(bar, picture.end) for bar in picture.bars),
        *(_bracket(state, picture.end, _TOP + devices * _ROW) if state else ()),
        *_scale(picture, height - 8),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _position(seconds: float, end: float) -> float:
    return _LEFT + seconds / (end or 1.0) * (_WIDTH - _LEFT - _RIGHT)


def _lanes(picture: Picture) -> Iterator[str]:
    for device, peak in enumerate(picture.peaks):
        top = _TOP + device * _ROW
        width = _WIDTH - _LEFT - _RIGHT
        yield f'<rect class="lane" x="{_LEFT}" y="{top}" width="{width}" height="{_BOX}" rx="3"/>'
        yield f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">device {device}</text>'
        yield f'<text class="quiet" x="{_WIDTH - _RIGHT + 8}" y="{top + 16}">{picture.memory_text(peak)}</text>'


def _box(bar: Bar, end: float) -> str:
    left, right = _position(bar.start, end), _position(bar.end, end)
    top = _TOP + bar.device * _ROW
    phase = bar.phase
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{max(right - left - 0.6, 0.2):.2f}" height="{_BOX}" rx="2" '
        f'fill="{stage_colour(bar.stage, phase)}"/>'
    )
    label = str(bar.unit)
    if right - left < len(label) * _LETTER + 2:
        return box
    place = f'x="{(left + right) / 2:.2f}" y="{top + 16}" text-anchor="middle"'
    return f'{box}<text {place} style="fill:{text_colour(phase)}">{label}</text>'


def _bracket(state: SteadyState, end: float, top: int) -> Iterator[str]:
    left, right = _position(state.start, end), _position(state.end, end)
    yield f'<path class="rule" d="M{left:.1f} {top}v6H{right:.1f}v-6"/>'
    place = f'x="{(left + right) / 2:.1f}" y="{top + 20}" text-anchor="middle"'
    yield f'<text class="quiet" {place}>repetend ×{state.count}</text>'


def _scale(picture: Picture, bottom: int) -> Iterator[str]:
    yield f'<text class="quiet" x="{_LEFT}" y="{bottom}">0</text>'
    end = picture.time_text(picture.end)
    yield f'<text class="quiet" x="{_WIDTH - _RIGHT}" y="{bottom}" text-anchor="end">{end}</text>'


_SIDE, _SCATTER_LEFT, _SCATTER_TOP, _SCATTER_RIGHT, _BOTTOM = 420, 64, 30, 190, 44
_SCATTER_STYLE = (
    "text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#24292f}"
    ".quiet{fill:#6e7781}.rule{stroke:#d0d7de;fill:none}.even{stroke:#8c959f;stroke-dasharray:4 4}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9198a1}.rule{stroke:#30363d}}"
)


@dataclass(frozen=True, slots=True)
class PointSeries:
    """Points of one colour: (along, up), above 0."""

    name: str
    points: tuple[tuple[float, float], ...]


def scatter_svg(title: str, axes: tuple[str, str], clouds: Sequence[PointSeries]) -> str:
    """A square with the same range on both axes; on the dashed line both figures are one."""
    values = [value for cloud in clouds for point in cloud.points for value in point]
    low, high = _range(values)
    width, height = _SCATTER_LEFT + _SIDE + _SCATTER_RIGHT, _SCATTER_TOP + _SIDE + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_SCATTER_STYLE}</style>",
        f'<text x="{_SCATTER_LEFT}" y="18">{escape(title)}: {escape(axes[1])} against {escape(axes[0])}</text>',
        f'<rect class="rule" x="{_SCATTER_LEFT}" y="{_SCATTER_TOP}" width="{_SIDE}" height="{_SIDE}"/>',
        *_ticks(low, high),
        f'<path class="even" d="M{_SCATTER_LEFT} {_SCATTER_TOP + _SIDE}L{_SCATTER_LEFT + _SIDE} {_SCATTER_TOP}"/>',
    ]
    for index, cloud in enumerate(clouds):
        colour = _colour(index, len(clouds))
        for along, up in cloud.points:
            x, y = _SCATTER_LEFT + _SIDE * _share(along, low, high), _SCATTER_TOP + _SIDE * (1 - _share(up, low, high))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>')
        y = _SCATTER_TOP + 12 + 18 * index
        parts.append(f'<circle cx="{_SCATTER_LEFT + _SIDE + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_SCATTER_LEFT + _SIDE + 26}" y="{y}">{escape(cloud.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _range(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 1.0, 10.0
    return min(values) / 1.15, max(values) * 1.15


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _ticks(low: float, high: float) -> Iterator[str]:
    """1, 2 and 5 times each power of ten."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for value in (each * 10.0**power for each in (1, 2, 5)):
            if low <= value <= high:
                x, y = (
                    _SCATTER_LEFT + _SIDE * _share(value, low, high),
                    _SCATTER_TOP + _SIDE * (1 - _share(value, low, high)),
                )
                yield f'<path class="rule" d="M{x:.1f} {_SCATTER_TOP}v{_SIDE}M{_SCATTER_LEFT} {y:.1f}h{_SIDE}"/>'
                below = _SCATTER_TOP + _SIDE + 16
                yield f'<text class="quiet" x="{x:.1f}" y="{below}" text-anchor="middle">{value:g}</text>'
                yield f'<text class="quiet" x="{_SCATTER_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _colour(index: int, count: int) -> str:
    parts = colorsys.hls_to_rgb(index / max(1, count), 0.5, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


_STAGE_GRAPH_WIDTH, _HEIGHT, _ACROSS, _DOWN = 104, 40, 64, 18
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
    width = max(x for x, _ in places) + _STAGE_GRAPH_WIDTH + 8
    height = max(y for _, y in places) + _HEIGHT + 20
    parts = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    parts.append(f'<title>{escape(title)}</title><defs><marker id="tip-of-edge" viewBox="0 0 8 8" refX="8"')
    parts.append('refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>')
    for (source, target), label in sorted(edges.items()):
        parts.append(_edge(places[source], places[target], label))
    for node, (x, y) in zip(nodes, places, strict=True):
        devices = escape(_shortened(f"device {devices_text(node.devices)}"))
        style = f'style="fill:{node.ink}"'
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_STAGE_GRAPH_WIDTH}" height="{_HEIGHT}" rx="5" fill="{node.colour}"/>'
        )
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
    return [
        (4 + columns[node] * (_STAGE_GRAPH_WIDTH + _ACROSS), 16 + rows[node] * (_HEIGHT + _DOWN))
        for node in range(nodes)
    ]


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
    left, top = source[0] + _STAGE_GRAPH_WIDTH, source[1] + _HEIGHT // 2
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
