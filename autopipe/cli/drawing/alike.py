"""Of many devices that do the same, one."""

from __future__ import annotations

from dataclasses import replace

from autopipe.cli.drawing.picture import Picture

MOST_DEVICES = 16
"""Devices of one step that are all drawn where several steps are."""


def one_of_each(picture: Picture) -> Picture:
    """The picture of one device of those with the same tasks in the same order, where they are more than a few.

    Of messages those between devices that are left are drawn.
    """
    if len(picture.memory) <= MOST_DEVICES:
        return picture
    first: dict[tuple[str, ...], int] = {}
    for device, bars in enumerate(picture.rows):
        first.setdefault(tuple(bar.name for bar in bars), device)
    row = {device: index for index, device in enumerate(first.values())}
    return replace(
        picture,
        bars=tuple(replace(bar, device=row[bar.device]) for bar in picture.bars if bar.device in row),
        memory=tuple(picture.memory[device] for device in row),
        limits=tuple(picture.limits[device] for device in row),
        transfers=tuple(
            replace(each, source=row[each.source], target=row[each.target])
            for each in picture.transfers
            if each.source in row and each.target in row
        ),
        devices=tuple(row),
    )
