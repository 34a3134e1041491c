"""Text of messages: plurals, lists, printable names, and numbers with units."""

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

    `many` is the plural if no rule gives it, for example of a noun with its verb: `plural(n, "node
    is", "nodes are")`.
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
    """Return a number with its noun in the matching form: `1 device`, `1,024 devices`."""
    return f"{count:,} {plural(count, noun)}"


def list_first(texts: Sequence[str], most: int) -> str:
    """Return the first `most` texts, separated by commas, and the number of further texts."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def printable(text: str) -> str:
    """Return `text` on one line, with an escape in place of each character that would move the
    cursor, or colour, reorder or hide text.

    Every name from a model, a plan or a schedule passes through this function before a person sees
    it.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks; each line is escaped by `printable`."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def bytes_text(size: float) -> str:
    """Return a number of bytes with about three digits and its unit: `3.10 GiB`."""
    return in_largest_unit(size, _BYTE_UNITS) or f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Format a time with three digits: `41.2 ms`."""
    return in_largest_unit(seconds, _SECONDS) or f"{seconds / 1e-9:.0f} ns"


def in_largest_unit(value: float, units: Sequence[tuple[str, float]]) -> str | None:
    """Return the value in the largest unit of `units` that is not larger than the value, or None if
    all units are larger. `units` lists (name, size), the largest first.
    """
    for unit, scale in units:
        if abs(value) >= scale:
            figure = value / scale
            return f"{figure:.{2 if figure < 10 else 1 if figure < 100 else 0}f} {unit}"
    return None
