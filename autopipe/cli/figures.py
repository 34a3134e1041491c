"""Figures as a person reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autopipe.ir.placement import node_ranges

_LONGEST_GROUP = 32
"""Characters of a group of devices within a sentence."""


def bytes_text(size: float) -> str:
    """A size with three digits or so: `3.10 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.{_decimals(size / scale)}f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time with three digits: `41.2 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.{_decimals(seconds / scale)}f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def kinds_text(names: Sequence[str], devices: Iterable[int]) -> str:
    """The kinds of some devices, by the names of all: `A100`, or `6 A100 and 2 V100`."""
    own = [names[device] for device in devices]
    return own[0] if len(set(own)) == 1 else counted_text(own)


def counted_text(names: Iterable[str]) -> str:
    """Names with how often each comes: `6 A100 and 2 V100`."""
    return " and ".join(f"{count} {name}" for name, count in Counter(names).items())


def devices_text(devices: Sequence[int]) -> str:
    """Devices as ranges: `0-3,8`; in another order than ascending, one by one."""
    if list(devices) != sorted(devices):
        return ",".join(map(str, devices))
    parts = node_ranges(devices)
    return ",".join(str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in parts)


def group_text(devices: Sequence[int]) -> str:
    """A group of devices within a sentence: of many that are no run, the first ones, the last and how many."""
    text = devices_text(devices)
    if len(text) <= _LONGEST_GROUP:
        return text
    return f"{devices[0]},{devices[1]},...,{devices[-1]} ({len(devices)} of them)"


def _decimals(value: float) -> int:
    """Decimals that make three digits."""
    return 2 if value < 10 else 1 if value < 100 else 0
