"""The timeline of a step as an SVG picture, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cli.drawing.markup import escape
from autopipe.cli.drawing.palette import stage_colour, text_colour
from autopipe.cli.drawing.picture import Bar, Picture
from autopipe.cli.drawing.steady import SteadyState

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
