"""A scatter plot as SVG, for light and dark pages, with the same logarithmic range along both
axes.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

_SIDE = 420
_LEFT = 64
_TOP = 30
_RIGHT = 190
_BOTTOM = 44
_STYLE = (
    "text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#24292f}"
    ".quiet{fill:#6e7781}.rule{stroke:#d0d7de;fill:none}.even{stroke:#8c959f;stroke-dasharray:4 4}"
    "@media "
    "(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9198a1}.rule{stroke:#30363d}}"
)


def scatter_svg(
    title: str, axes: tuple[str, str], series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Points (along, up) above 0, a colour a series; on the dashed line both figures are one."""
    values = [value for points in series.values() for point in points for value in point]
    low, high = (min(values) / 1.15, max(values) * 1.15) if values else (1.0, 10.0)

    def place(value: float) -> float:
        return _SIDE * math.log(value / low) / math.log(high / low)

    width = _LEFT + _SIDE + _RIGHT
    height = _TOP + _SIDE + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        (
            f'<text x="{_LEFT}" y="18">{escape(title)}: {escape(axes[1])} against '
            f"{escape(axes[0])}</text>"
        ),
        f'<rect class="rule" x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}"/>',
    ]
    for value in _ticks(low, high):
        x = _LEFT + place(value)
        y = _TOP + _SIDE - place(value)
        parts.append(f'<path class="rule" d="M{x:.1f} {_TOP}v{_SIDE}M{_LEFT} {y:.1f}h{_SIDE}"/>')
        parts.append(
            f'<text class="quiet" x="{x:.1f}" y="{_TOP + _SIDE + 16}" '
            f'text-anchor="middle">{value:g}</text>'
        )
        parts.append(
            f'<text class="quiet" x="{_LEFT - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end">{value:g}</text>'
        )
    parts.append(f'<path class="even" d="M{_LEFT} {_TOP + _SIDE}L{_LEFT + _SIDE} {_TOP}"/>')
    for index, (name, points) in enumerate(series.items()):
        red, green, blue = (
            round(255 * part) for part in colorsys.hls_to_rgb(index / len(series), 0.5, 0.65)
        )
        fill = f'fill="#{red:02x}{green:02x}{blue:02x}"'
        for along, up in points:
            x = _LEFT + place(along)
            y = _TOP + _SIDE - place(up)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {fill} fill-opacity="0.75"/>')
        row = _TOP + 12 + 18 * index
        parts.append(f'<circle cx="{_LEFT + _SIDE + 16}" cy="{row - 4}" r="4" {fill}/>')
        parts.append(f'<text x="{_LEFT + _SIDE + 26}" y="{row}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 times each power of ten."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (
            value for value in (each * 10.0**power for each in (1, 2, 5)) if low <= value <= high
        )
