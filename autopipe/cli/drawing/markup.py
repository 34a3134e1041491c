"""Tables of a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as html_escape

from autopipe.cli.output import printable_lines


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
