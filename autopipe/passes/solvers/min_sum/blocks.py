"""Large tables are worked on in blocks that a core's cache holds."""

from __future__ import annotations

from collections.abc import Iterator

ENTRIES = 1 << 15


def blocks(length: int, width: int) -> Iterator[slice]:
    """Ranges of indices that together are all, of as many as have ENTRIES entries when each index has `width`."""
    step = max(1, ENTRIES // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
