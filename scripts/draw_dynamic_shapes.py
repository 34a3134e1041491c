"""Draw how selected rows are stored: docs/methods/dynamic-shapes.svg.

python scripts/draw_dynamic_shapes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "methods" / "dynamic-shapes.svg"
MASK = (True, False, True, False, False, True)
CELL = 26
COLUMN = 168
LEFT = 24
TOP = 64
WIDTH = 5 * COLUMN + 8
HEIGHT = TOP + len(MASK) * CELL + 70
SELECTED = "#4c78a8"
IGNORED = "#e4e4e4"
FILLED = "#f5b971"


def text_svg(x: float, y: float, words: str, anchor: str = "middle", size: int = 12) -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def column_svg(place: int, title: str, cells: Sequence[tuple[str, str]], caption: str) -> list[str]:
    """Return the shapes of one column: a title, (fill, label) cells from the top, and a caption."""
    x = LEFT + place * COLUMN
    middle = x + 2 * CELL
    lines = [text_svg(middle, 30, title, size=13)]
    for row, (fill, label) in enumerate(cells):
        y = TOP + row * CELL
        lines.append(
            f'<rect x="{x}" y="{y}" width="{4 * CELL}" height="{CELL - 3}" fill="{fill}" '
            'stroke="#333" stroke-width="0.8"/>'
        )
        lines.append(text_svg(middle, y + CELL / 2 + 2, label))
    lines.append(text_svg(middle, TOP + len(MASK) * CELL + 28, caption, size=11))
    return lines


def arrow_svg(place: int, label: str) -> list[str]:
    """Return an arrow behind a column, with a label above it."""
    start = LEFT + place * COLUMN + 4 * CELL + 8
    end = LEFT + (place + 1) * COLUMN - 8
    y = TOP + len(MASK) * CELL / 2
    head = f"{end},{y} {end - 7},{y - 4} {end - 7},{y + 4}"
    return [
        f'<line x1="{start}" y1="{y}" x2="{end - 6}" y2="{y}" stroke="#333"/>',
        f'<polygon points="{head}" fill="#333"/>',
        text_svg((start + end) / 2, y - 8, label, size=11),
    ]


def draw_svg() -> str:
    """Return the figure as SVG."""
    selected = [row for row, is_selected in enumerate(MASK) if is_selected]
    mask = [(SELECTED if each else IGNORED, "true" if each else "false") for each in MASK]
    stored = [(SELECTED if each else IGNORED, f"f(x{row})") for row, each in enumerate(MASK)]
    filled = [(SELECTED, f"f(x{row})") if each else (FILLED, "0") for row, each in enumerate(MASK)]
    packed = [(SELECTED, f"f(x{row})") for row in selected]
    parts = [
        *column_svg(0, "mask", mask, "n = 3 of 6 selected"),
        *column_svg(1, "file: f(Compress(x))", packed, "n rows, n unknown"),
        *column_svg(2, "graph: f(x)", stored, "6 rows, 3 of them arbitrary"),
        *column_svg(3, "filled", filled, "neutral element of the sum"),
        *column_svg(4, "sum over rows", [(SELECTED, "static")], "equal in file and graph"),
        *arrow_svg(2, "fill"),
        *arrow_svg(3, "reduce"),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(draw_svg(), encoding="utf-8")
