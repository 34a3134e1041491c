"""From who holds which part to the order of a group's devices and the splits over it that say the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.layout import mesh_of
from autopipe.ir.placement import Split
from autopipe.passes.annotations.sharding import Sharding


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """An axis of a node's iteration space in `degree` parts; `places` says which one each device has.

    Devices are in ascending order.
    """

    axis: str
    degree: int
    places: tuple[int, ...]


Cuts = tuple[AxisSplit, ...]
"""All cuts of a node, in any order; () where each device computes it whole."""


def splits_over(order: Sequence[int], cuts: Cuts) -> tuple[Split, ...] | None:
    """The splits, outer to inner over the devices in this order, that make `cuts`; None where none do.

    Devices that the splits leave over are innermost, as in a stage.
    """
    ascending = sorted(order)
    rank = {device: index for index, device in enumerate(ascending)}
    places = {cut.axis: tuple(cut.places[rank[device]] for device in order) for cut in cuts}
    # The further out a split is, the later comes the first device that is not in its first part.
    outer = sorted(cuts, key=lambda cut: -next((at for at, place in enumerate(places[cut.axis]) if place), 0))
    splits = tuple(Split(cut.axis, cut.degree) for cut in outer)
    rest = len(order)
    for split in splits:
        if rest % split.degree:
            return None
        rest //= split.degree
    for split, axis in zip(splits, mesh_of(splits, len(order)), strict=True):
        if places[split.axis] != tuple(axis.place(position) for position in range(len(order))):
            return None
    return splits


def order_of(shardings: Iterable[Sharding], cuts: Iterable[Cuts]) -> tuple[int, ...] | None:
    """An order of a group's devices over which splits make all of `cuts`; None where none of those tried does.

    Tried are the orders in which `shardings`, all of this group, list its devices, first of values that each device
    holds whole, and the ascending one. Those that keep the order in which copies of a block are listed go before.
    """
    distinct = tuple(dict.fromkeys(sharding.devices for sharding in shardings))
    wanted = tuple(dict.fromkeys(cuts))
    candidates = tuple(dict.fromkeys(_candidates(distinct)))
    for order in sorted(candidates, key=lambda order: not _keeps(order, distinct)):
        if all(splits_over(order, each) is not None for each in wanted):
            return order
    return None


def _candidates(listings: Sequence[tuple[tuple[int, ...], ...]]) -> Iterator[tuple[int, ...]]:
    for groups in listings:
        if len(groups) == 1:
            yield groups[0]
    for groups in listings:
        listed = tuple(device for group in groups for device in group)
        yield tuple(sorted(listed))
        yield listed


def _keeps(order: Sequence[int], listings: Sequence[tuple[tuple[int, ...], ...]]) -> bool:
    """True if copies of each block are listed in this order."""
    position = {device: index for index, device in enumerate(order)}
    return all(
        position[first] < position[second]
        for groups in listings
        for group in groups
        for first, second in itertools.pairwise(group)
    )
