"""Draw the folders of the package and their imports: docs/contributing/architecture.svg.

python scripts/draw_architecture.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "contributing" / "architecture.svg"
ROWS = (
    ("cli",),
    ("api",),
    ("passes.explain", "passes.export", "passes.lower", "passes.pipeline"),
    ("passes.auto", "passes.placement", "passes.schedule", "passes.sharding", "passes.partition"),
    ("passes.cost", "passes.analysis", "passes.solvers", "passes.annotations", "passes.frontend"),
    ("configs", "backends.torch", "backends.onnxruntime"),
    ("ir",),
)
"""Folders of the picture, row by row from the top; imports lead downwards or to a neighbour."""
WIDTH = 150
HEIGHT = 44
GAP = 14
STEP = 92


def folder_of(module: str) -> str | None:
    """Return the folder of `ROWS` that contains a module, None if there is none."""
    name = module.removeprefix("autopipe.")
    return next(
        (each for row in ROWS for each in row if name == each or name.startswith(f"{each}.")), None
    )


def count_lines_and_imports() -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Return (lines, imports): lines of code by folder, imports by pair of folders."""
    lines: Counter[str] = Counter()
    arrows: Counter[tuple[str, str]] = Counter()
    for path in sorted((ROOT / "autopipe").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        own = folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own is None:
            continue
        lines[own] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("autopipe.")
            ):
                other = folder_of(node.module)
                if other is not None and other != own:
                    arrows[own, other] += 1
    return lines, arrows


def draw_svg() -> str:
    """The SVG."""
    lines, arrows = count_lines_and_imports()
    places: dict[str, tuple[float, float]] = {}
    most = max(len(row) for row in ROWS)
    width = most * (WIDTH + GAP) + GAP
    for depth, row in enumerate(ROWS):
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        for index, each in enumerate(row):
            places[each] = left + index * (WIDTH + GAP), 16 + depth * STEP
    height = 16 + len(ROWS) * STEP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#7a8594"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for (source, target), count in sorted(arrows.items()):
        if target == "ir":
            continue  # Everything reads the data types.
        x1, y1 = places[source]
        x2, y2 = places[target]
        down = y2 > y1
        start = x1 + WIDTH / 2, y1 + (HEIGHT if down else HEIGHT / 2)
        end = x2 + WIDTH / 2, y2 if down else y2 + HEIGHT / 2
        stroke = min(4.0, 0.8 + count / 25)
        parts.append(
            f'<path d="M{start[0]:.0f} {start[1]:.0f} L{end[0]:.0f} {end[1]:.0f}" stroke="#7a8594" '
            f'stroke-width="{stroke:.1f}" opacity="0.55" fill="none" marker-end="url(#head)"/>'
        )
    for name, (x, y) in places.items():
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#e8f0fa" '
            'stroke="#2c5b95"/>'
        )
        parts.append(
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 19}" text-anchor="middle">{escape(name)}</text>'
        )
        parts.append(
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 36}" text-anchor="middle" font-size="11" '
            f'fill="#555">{lines[name]:,} lines</text>'
        )
    return "\n".join((*parts, "</svg>", ""))


if __name__ == "__main__":
    TARGET.write_text(draw_svg(), encoding="utf-8")
    print(TARGET)
