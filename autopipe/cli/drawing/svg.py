"""SVG figures for light and dark pages: the timeline of a step, and the graph of stages or blocks.
Also HTML tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from html import escape as html_escape

from autopipe.api.timeline_figure import (
    END_STYLES,
    Bar,
    Picture,
    block_kinds,
    legend_of,
    stage_colour,
    text_colour,
)
from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.placement import devices_text
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import StepEndSpan
from autopipe.ir.words import bytes_text, plural, printable_lines


def escape(text: str) -> str:
    """Return `text` escaped for markup. Its control characters are replaced by visible ones,
    because XML does not allow them.
    """
    return html_escape(printable_lines(text))


def markup_table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table that scrolls horizontally if it is too wide. `rows` are markup."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def markup_row(cells: Sequence[str], colour: str | None = None) -> str:
    """Return a table row with escaped texts. `colour` adds a colour mark to the first cell."""
    mark = f'<i style="background:{colour}"></i>' if colour else ""
    first, *others = (escape(cell) for cell in cells)
    return f"<tr><td>{mark}{first}</td>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"


_FIGURE_WIDTH = 1000
_LEFT_MARGIN = 74
_RIGHT_MARGIN = 84
_TOP_MARGIN = 34
_ROW_HEIGHT = 30
_BAR_HEIGHT = 24
_LETTER_WIDTH = 6.2
"""Width of a letter of the labels in pixels."""
_SWATCH_WIDTH = 10
_LEGEND_ROW_HEIGHT = 18
"""Size of a legend in pixels: width of the mark of a colour, and height of a row."""
_STYLE = (
    "text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#24292f}"
    ".paper{fill:#ffffff}.quiet{fill:#656d76}.lane{fill:#f3f4f6}.rule{stroke:#8c959f;fill:none}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117}"
    ".quiet{fill:#9198a1}.lane{fill:#1c2129}}"
)
"""Style sheet of a figure. It includes a background, because its colours follow the theme of the
system, which may differ from the theme of the page.
"""


def timeline_svg(picture: Picture) -> str:
    """Return the timeline of a step as SVG. Each device has a row with its tasks in the colours of
    the stages, numbered by micro-batch, its gradient sums and update, and its peak memory. The
    legend is below.
    """
    below = _TOP_MARGIN + len(picture.memory) * _ROW_HEIGHT
    scale = below + (38 if picture.steady else 18)
    legend = _legend_rows(picture, scale + 22)
    height = scale + 12 + len(legend) * _LEGEND_ROW_HEIGHT
    end = picture.time_text(picture.end)
    right = _FIGURE_WIDTH - _RIGHT_MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_FIGURE_WIDTH} {height}" '
        'role="img">',
        "<metadata>autopipe</metadata>",
        f"<title>{escape(picture.title)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{_FIGURE_WIDTH}" height="{height}"/>',
        f'<text x="{_LEFT_MARGIN}" y="18">{escape(picture.title)}</text>',
    ]
    for device, peak in enumerate(picture.peaks):
        top = _TOP_MARGIN + device * _ROW_HEIGHT
        parts.append(
            f'<rect class="lane" x="{_LEFT_MARGIN}" y="{top}" width="{right - _LEFT_MARGIN}" '
            f'height="{_BAR_HEIGHT}" rx="3"/>'
        )
        parts.append(
            f'<text x="{_LEFT_MARGIN - 8}" y="{top + 16}" text-anchor="end">device {device}</text>'
        )
        parts.append(
            f'<text class="quiet" x="{right + 8}" y="{top + 16}">{picture.memory_text(peak)}</text>'
        )
    parts += (_task_bar(bar, picture.end) for bar in picture.bars)
    parts += (_end_bar(span, picture.end) for span in picture.ends)
    if (state := picture.steady) is not None:
        first = _x_of_time(state.start, picture.end)
        last = _x_of_time(state.end, picture.end)
        place = f'x="{(first + last) / 2:.1f}" y="{below + 20}" text-anchor="middle"'
        parts.append(f'<path class="rule" d="M{first:.1f} {below}v6H{last:.1f}v-6"/>')
        parts.append(f'<text class="quiet" {place}>steady state ×{state.count}</text>')
    parts.append(f'<text class="quiet" x="{_LEFT_MARGIN}" y="{scale}">0</text>')
    parts.append(f'<text class="quiet" x="{right}" y="{scale}" text-anchor="end">{end}</text>')
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def _legend_rows(picture: Picture, top: int) -> list[str]:
    """Return the rows of the legend. The text of the first row is at `top`."""
    legend = legend_of([picture])
    entries = [*legend.entries, *([("none", legend.more)] if legend.more else [])]
    rows = [""]
    x = float(_LEFT_MARGIN)
    for colour, text in entries:
        width = _SWATCH_WIDTH + 6 + len(text) * 6.8 + 16
        if x + width > _FIGURE_WIDTH and rows[-1]:
            rows.append("")
            x = float(_LEFT_MARGIN)
        y = top + (len(rows) - 1) * _LEGEND_ROW_HEIGHT
        box = (
            f'x="{x:.1f}" y="{y - 9}" width="{_SWATCH_WIDTH}" height="{_SWATCH_WIDTH}" rx="2" '
            f'style="fill:{colour}"'
        )
        rows[-1] += (
            f'<rect {box}/><text class="quiet" x="{x + _SWATCH_WIDTH + 6:.1f}" '
            f'y="{y}">{escape(text)}</text>'
        )
        x += width
    return [row for row in rows if row]


def _x_of_time(seconds: float, end: float) -> float:
    return _LEFT_MARGIN + seconds / (end or 1.0) * (_FIGURE_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN)


def _task_bar(bar: Bar, end: float) -> str:
    left = _x_of_time(bar.start, end)
    right = _x_of_time(bar.end, end)
    top = _TOP_MARGIN + bar.device * _ROW_HEIGHT
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{max(right - left - 0.6, 0.2):.2f}" '
        f'height="{_BAR_HEIGHT}" rx="2" '
        f'fill="{stage_colour(bar.stage, bar.phase)}"/>'
    )
    return box + _bar_label(str(bar.unit), left, right, top, text_colour(bar.phase))


def _end_bar(span: StepEndSpan, end: float) -> str:
    """Return the bar of a gradient sum or update. It is at least one pixel wide, because this work
    often takes a hundredth of the step.
    """
    left = _x_of_time(span.start, end)
    right = _x_of_time(span.end, end)
    top = _TOP_MARGIN + span.device * _ROW_HEIGHT
    style = END_STYLES[span.kind]
    what = span.kind.value if span.stage is None else f"{span.kind.value} of stage {span.stage}"
    box = (
        f'<rect class="end" x="{left:.2f}" y="{top}" width="{max(right - left - 0.6, 1):.2f}" '
        f'height="{_BAR_HEIGHT}" style="fill:{style.fill}"><title>{what}</title></rect>'
    )
    return box + _bar_label(style.letter, left, right, top, style.ink)


def _bar_label(text: str, left: float, right: float, top: int, colour: str) -> str:
    """Return a label in the middle of a bar, or "" if the bar is too narrow."""
    if right - left < len(text) * _LETTER_WIDTH + 2:
        return ""
    place = f'x="{(left + right) / 2:.2f}" y="{top + 16}" text-anchor="middle"'
    return f'<text {place} style="fill:{colour}">{text}</text>'


_BOX_WIDTH = 104
_BOX_HEIGHT = 40
_HORIZONTAL_GAP = 64
_VERTICAL_GAP = 18
"""Width and height of the box of a node, and the horizontal and vertical distances between boxes,
in pixels.
"""
_MAX_BOX_LETTERS = 13
"""Maximum number of letters in a box."""

GraphNode = tuple[str, tuple[int, ...], int, Phase]
"""Name and devices (the two lines of a box), and the stage and phase that determine its colour."""


def plan_graph_svg(plan: Plan) -> str:
    """Return the graph of the stages. The label of an edge is the size of its messages per
    micro-batch.
    """
    sent: dict[tuple[int, int], int] = {}
    for message in plan.prediction.messages:
        edge = message.source_stage, message.target_stage
        sent[edge] = sent.get(edge, 0) + message.forward_bytes
    nodes = [
        (f"stage {index}", each.devices, index, Phase.FORWARD)
        for index, each in enumerate(plan.placement.stages)
    ]
    return _graph_svg(
        "stages and what they send", nodes, {edge: bytes_text(size) for edge, size in sent.items()}
    )


def block_graph_svg(graph: BlockGraph) -> str:
    kinds = zip(graph.blocks, block_kinds(graph.blocks), strict=True)
    nodes = [(block.name, block.devices, stage, phase) for block, (stage, phase, _) in kinds]
    edges = {
        (source, target): f"+{block.delay(place)}" if block.delay(place) else ""
        for target, block in enumerate(graph.blocks)
        for place, source in enumerate(block.after)
    }
    return _graph_svg("the blocks of a unit", nodes, edges)


def _graph_svg(title: str, nodes: Sequence[GraphNode], edges: Mapping[tuple[int, int], str]) -> str:
    """Return the SVG of a graph. Nodes are ordered from left to right by the length of the
    longest path to them. The values of `edges` are the labels of the edges.
    """
    places = _box_positions(len(nodes), edges)
    width = max(x for x, _ in places) + _BOX_WIDTH + 8
    height = max(y for _, y in places) + _BOX_HEIGHT + 20
    parts = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    parts.append(
        f'<title>{escape(title)}</title><defs><marker id="tip-of-edge" viewBox="0 0 8 8" refX="8"'
    )
    parts.append(
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 '
        '8z"/></marker></defs>'
    )
    for (source, target), label in sorted(edges.items()):
        parts.append(_edge_svg(places[source], places[target], label))
    for (name, devices, stage, phase), (x, y) in zip(nodes, places, strict=True):
        style = f'style="fill:{"#ffffff" if phase is Phase.BACKWARD else "#10131a"}"'
        colour = stage_colour(stage, phase)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="5" '
            f'fill="{colour}"/>'
        )
        group = f"{plural(len(devices), 'device')} {devices_text(devices)}"
        for line, text in ((17, name), (32, group)):
            shortened = (
                text if len(text) <= _MAX_BOX_LETTERS else text[: _MAX_BOX_LETTERS - 1] + "…"
            )
            parts.append(f'<text {style} x="{x + 8}" y="{y + line}">{escape(shortened)}</text>')
    return f'<div class="graph">{"".join([*parts, "</svg>"])}</div>'


def _box_positions(nodes: int, edges: Mapping[tuple[int, int], str]) -> list[tuple[int, int]]:
    """Return the upper left corner of each node. Its column is the length of the longest path to
    it, and its row is near the rows of its predecessors.
    """
    before: dict[int, list[int]] = {node: [] for node in range(nodes)}
    for source, target in sorted(edges):
        before[target].append(source)
    columns: dict[int, int] = {}
    for node in TopologicalSorter(before).static_order():
        columns[node] = max((columns[other] + 1 for other in before[node]), default=0)
    rows: dict[int, int] = {}
    for column in range(max(columns.values()) + 1):
        members = [node for node in before if columns[node] == column]
        members.sort(
            key=lambda node: (min((rows[other] for other in before[node]), default=node), node)
        )
        rows.update((node, row) for row, node in enumerate(members))
    return [
        (
            4 + columns[node] * (_BOX_WIDTH + _HORIZONTAL_GAP),
            16 + rows[node] * (_BOX_HEIGHT + _VERTICAL_GAP),
        )
        for node in before
    ]


def _edge_svg(source: tuple[int, int], target: tuple[int, int], label: str) -> str:
    left = source[0] + _BOX_WIDTH
    top = source[1] + _BOX_HEIGHT // 2
    right = target[0]
    bottom = target[1] + _BOX_HEIGHT // 2
    middle = (left + right) / 2
    long = right - left > _HORIZONTAL_GAP
    # An edge between distant columns is curved, so that it passes above the nodes between them.
    path = (
        f"M{left} {top}C{middle} {top - 60 * long} {middle} {bottom - 60 * long} {right} {bottom}"
    )
    place = f'x="{middle}" y="{(top + bottom) / 2 - 5 - 45 * long}"'
    return (
        f'<path class="edge" d="{path}" marker-end="url(#tip-of-edge)"/>'
        f'<text class="size" {place} text-anchor="middle">{escape(label)}</text>'
    )
