"""Which devices have a row in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cli.drawing.picture import Picture

_MOST_ROWS = 64


def row_margin(picture: Picture) -> int:
    """Characters that the devices' numbers take."""
    return len(str(len(picture.memory) - 1)) + 1


def timeline_rows(picture: Picture) -> Iterator[tuple[int | None, str]]:
    """Devices with the label of their row; None for the row that stands for those left out in the middle."""
    count, width = len(picture.memory), row_margin(picture) - 1
    half = _MOST_ROWS // 2
    for device in range(count):
        if count <= _MOST_ROWS or device < half or device >= count - half:
            yield device, f"{device:{width}} "
        elif device == half:
            yield None, f"{'⋯':>{width}} {count - 2 * half} more devices"
