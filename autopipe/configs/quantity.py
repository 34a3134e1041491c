"""Sizes, rates and times as a person writes them: `14GiB`, `900GB/s`, `15.7TFLOP/s`, `5us`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_FRACTIONS = {"": Fraction(1), "m": Fraction(1, 10**3), "u": Fraction(1, 10**6), "n": Fraction(1, 10**9)}
_WRITTEN = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([a-zA-Z/]*)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit with the prefixes that may stand before it."""

    symbol: str
    """Unit after the prefix, such as `B`."""

    noun: str
    """Name of the quantity, with its article."""

    example: str
    """A quantity that shows how it is written."""

    whole: bool = False
    """True if a quantity is a whole number of units."""

    def parse(self, text: str) -> float | None:
        """The quantity in plain units, or None where `text` is none of this unit; a bare number counts plain units."""
        written = _WRITTEN.fullmatch(text)
        if written is None:
            return None
        number, suffix = written.groups()
        if suffix and not suffix.endswith(self.symbol):
            return None
        scale = self._prefixes().get(suffix.removesuffix(self.symbol))
        if scale is None:
            return None
        value = Fraction("0" + number) * scale
        if not self.whole:
            return float(value)
        return int(value) if value.denominator == 1 else None

    def format(self, value: float) -> str:
        """The shortest exact way to write a whole quantity with a prefix; otherwise the plain number."""
        if self.whole and value >= 1:
            for prefix, scale in sorted((_BINARY | _DECIMAL).items(), key=lambda pair: -pair[1]):
                if value % scale == 0 and prefix != "K":
                    return f"{int(value) // scale}{prefix}{self.symbol}"
        return repr(value)

    def _prefixes(self) -> dict[str, Fraction]:
        if self.symbol == "s":
            return _FRACTIONS
        return {prefix: Fraction(scale) for prefix, scale in (_DECIMAL | _BINARY).items()}


BYTES = Unit("B", "a size", "14GiB", whole=True)
BYTES_PER_SECOND = Unit("B/s", "a rate", "900GB/s")
FLOPS = Unit("FLOP/s", "a rate", "15.7TFLOP/s")
SECONDS = Unit("s", "a time", "5us or 10s")


def parse_bytes(text: str) -> int | None:
    """A size such as `14GiB` or `512MB` in bytes, or None where it is not one."""
    value = BYTES.parse(text)
    return None if value is None else int(value)


def format_bytes(size: int) -> str:
    """A size in the largest unit that writes it exactly, such as `14GiB`."""
    return BYTES.format(size)
