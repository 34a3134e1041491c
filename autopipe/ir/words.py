"""Text for messages: plurals, lists, printable names, and numbers with units."""

from __future__ import annotations

from collections.abc import Sequence

_BYTE_UNITS = (
    ("EiB", 2**60),
    ("PiB", 2**50),
    ("TiB", 2**40),
    ("GiB", 2**30),
    ("MiB", 2**20),
    ("KiB", 2**10),
)


_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def plural(count: float, noun: str, many: str = "") -> str:
    """Return `noun` if `count` is 1, otherwise its plural.

    `many` states a plural for which no rule exists, for example of a noun with its verb: `plural(n,
    "node is", "nodes are")`.
    """
    if count == 1:
        return noun
    if many:
        return many
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy")):
        return noun[:-1] + "ies"
    if noun.endswith("axis"):
        return noun[:-2] + "es"
    return noun + ("es" if noun.endswith(("ch", "s", "x")) else "s")


def count_text(count: int, noun: str) -> str:
    """Return a number with thousands separators and its noun in the matching form: `1 device`,
    `1,024 devices`.
    """
    return f"{count:,} {plural(count, noun)}"


def join_first(texts: Sequence[str], most: int) -> str:
    """Return the first `most` texts, separated by commas, followed by the number of texts that are
    omitted, if any.
    """
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def printable(text: str) -> str:
    """Return `text` on one line. Each character that would move the cursor, or colour, reorder or
    hide text, is replaced by an escape sequence.

    Each name from a model, a plan or a schedule must pass through this function before it is shown
    to a person, because these files are untrusted.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks, and with all other unsafe characters escaped as by
    `printable`.
    """
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def bytes_text(size: float) -> str:
    """Return a number of bytes with about three digits and its unit: `3.10 GiB`."""
    return format_in_largest_unit(size, _BYTE_UNITS) or f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a time in seconds with about three digits and its unit: `41.2 ms`."""
    return format_in_largest_unit(seconds, _SECONDS) or f"{seconds / 1e-9:.0f} ns"


def format_in_largest_unit(value: float, units: Sequence[tuple[str, float]]) -> str | None:
    """Return `value` as text in the largest unit that does not exceed it, or None if all units
    exceed it. `units` lists (name, size), the largest unit first.
    """
    for unit, scale in units:
        if abs(value) >= scale:
            figure = value / scale
            return f"{figure:.{2 if figure < 10 else 1 if figure < 100 else 0}f} {unit}"
    return None
