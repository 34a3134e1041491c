"""Points of two figures against one another as an SVG picture, both axes logarithmic, for light and dark pages."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.cli.drawing.markup import escape

_SIDE, _LEFT, _TOP, _RIGHT, _BOTTOM = 420, 64, 30, 190, 44
_STYLE = (
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
    width, height = _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="18">{escape(title)}: {escape(axes[1])} against {escape(axes[0])}</text>',
        f'<rect class="rule" x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}"/>',
        *_ticks(low, high),
        f'<path class="even" d="M{_LEFT} {_TOP + _SIDE}L{_LEFT + _SIDE} {_TOP}"/>',
    ]
    for index, cloud in enumerate(clouds):
        colour = _colour(index, len(clouds))
        for along, up in cloud.points:
            x, y = _LEFT + _SIDE * _share(along, low, high), _TOP + _SIDE * (1 - _share(up, low, high))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>')
        y = _TOP + 12 + 18 * index
        parts.append(f'<circle cx="{_LEFT + _SIDE + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + _SIDE + 26}" y="{y}">{escape(cloud.name)}</text>')
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
                x, y = _LEFT + _SIDE * _share(value, low, high), _TOP + _SIDE * (1 - _share(value, low, high))
                yield f'<path class="rule" d="M{x:.1f} {_TOP}v{_SIDE}M{_LEFT} {y:.1f}h{_SIDE}"/>'
                yield f'<text class="quiet" x="{x:.1f}" y="{_TOP + _SIDE + 16}" text-anchor="middle">{value:g}</text>'
                yield f'<text class="quiet" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _colour(index: int, count: int) -> str:
    parts = colorsys.hls_to_rgb(index / max(1, count), 0.5, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
