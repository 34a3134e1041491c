"""Statements of generated functions, and the source lines of statements and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_LINE_LENGTH: Final = 120
"""Maximum number of columns of a generated line, unless a single call is longer."""
_COMMENT_COLUMN: Final = 72
"""Column at which comments of short statements start."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of a generated function: `targets = code; del dead  # comment`."""

    targets: tuple[str, ...]
    """Variables that the statement assigns; "_" for a result that no statement reads."""
    code: str
    dead: tuple[str, ...] = ()
    """Variables that no later statement reads."""
    name: str = ""
    """Name of the operator for the comment."""
    facts: str = ""
    """Shape of the first result, and splits of the operator over devices, for the comment."""
    helper: str = ""
    """Source of the function `loop_N` that the statement calls; "" if it calls none."""

    def lines(self, margin: str = "    ") -> list[str]:
        """Return the source lines. The comment precedes the statement if a line would be too
        long.
        """
        drop = f"; del {', '.join(self.dead)}" if self.dead else ""
        assigned = f"{', '.join(self.targets)} = " if self.targets else ""
        statement = f"{margin}{assigned}{self.code}{drop}"
        comment = " ".join(filter(None, (self.name, self.facts)))
        if not comment:
            return [statement]
        pad = max(2, _COMMENT_COLUMN - len(statement))
        if len(statement) + pad + len(comment) <= MAX_LINE_LENGTH:
            return [f"{statement}{' ' * pad}# {comment}"]
        return [f"{margin}# {comment}", statement]

    def wrapped_lines(self) -> list[str]:
        """Return the source lines, with line breaks in a long call. The comment is at the end of
        the last line.
        """
        if "'" in self.code or '"' in self.code:
            return self.lines()
        comment = self.facts and f"  # {self.facts}"
        lines = self.lines()
        if len(lines) > 1 or len(lines[0]) > MAX_LINE_LENGTH:
            statement = f"    {', '.join(self.targets)} = {self.code}"
            lines = wrapped_call(statement, "    ", MAX_LINE_LENGTH - len(comment))
            lines[-1] += comment
        return lines


def wrapped_call(line: str, margin: str, limit: int = MAX_LINE_LENGTH) -> list[str]:
    """Return a line that ends with a call or a tuple in parentheses, with line breaks between its
    elements if it has more than `limit` columns. The line must contain no string literals.
    """
    if len(line) <= limit or "(" not in line:
        return [line]
    indent = f"{margin}    "
    start = line.index("(") + 1
    pieces = line[start:].split(", ")
    lines = [f"{line[:start]}{pieces[0]}"]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 3 > limit:
            lines[-1] += ","
            lines.append(f"{indent}{piece}")
        else:
            lines[-1] += f", {piece}"
    return lines


def tuple_code(elements: Sequence[str]) -> str:
    """Return the code of a tuple of the given expressions."""
    return f"({', '.join(elements)}{',' if len(elements) == 1 else ''})"
