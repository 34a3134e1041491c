"""Who sends what where a group holds a tensor in another layout: every device gets each block it lacks once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.layout import Box, Layout


@dataclass(frozen=True, slots=True)
class Move:
    """A block, in coordinates of the whole tensor, that one position of a group gives to another or to itself."""

    source: int
    target: int
    box: Box


def moves_between(source: Layout, target: Layout, group: int) -> Iterator[Move]:
    """The moves that make `target` of `source`, whose blocks are even and no shares of sums, by target.

    A device keeps what it has. Of several holders the nearest one sends, which mostly is in the same node. What of a
    block sticks out of the tensor nobody sends.
    """
    holders: dict[Box, list[int]] = {}
    for position in range(group):
        holders.setdefault(source.box(position), []).append(position)
    for position in range(group):
        need = target.box(position)
        for box, places in holders.items():
            common = box.intersect(need)
            if common is not None:
                yield Move(min(places, key=lambda place: abs(place - position)), position, common)
