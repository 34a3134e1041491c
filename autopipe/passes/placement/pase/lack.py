"""What the device that lacks most lacks of a tensor, for all pairs of two sets of layouts: `ir/volume.py` as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxes, Window, degree_of, place_along
from autopipe.ir.volume import cut_by_neighbours

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Lack:
    """What devices lack, [sources, targets]."""

    share: _Floats
    """Of the device that lacks most, as a share of the whole tensor."""
    dimensions: _Integers
    """The number of dimensions along which a device lacks something."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The few ways in which layouts cut one dimension, and which of them each layout has."""

    axes: list[MeshAxes]
    windows: list[Window | None]
    of: _Integers

    def by_neighbours(self, size: int) -> Places:
        """The same with each `size` neighbouring devices counted as one."""
        found = [cut_by_neighbours(*way, size) for way in zip(self.axes, self.windows, strict=True)]
        return Places([axes for axes, _ in found], [window for _, window in found], self.of)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One dimension of `extent` cells: how sources cut it, and how targets do."""

    dimension: int
    held: Places
    wanted: Places
    extent: int

    def by_neighbours(self, size: int) -> Pair:
        """The same with each `size` neighbouring devices counted as one (`ir/volume.py`)."""
        return replace(self, held=self.held.by_neighbours(size), wanted=self.wanted.by_neighbours(size))

    def spread(self, table: NDArray[Any]) -> NDArray[Any]:
        """A table of ways, [of sources, of targets], as one of layouts."""
        found: NDArray[Any] = table[self.held.of][:, self.wanted.of]
        return found


def pairs_by_dimension(sources: Sequence[Layout], targets: Sequence[Layout]) -> list[Pair]:
    """Those dimensions that some layout cuts."""
    found = (
        Pair(place, _places(sources, place), _places(targets, place), extent)
        for place, extent in enumerate(targets[0].shape)
    )
    return [pair for pair in found if pair.held.axes != [()] or pair.wanted.axes != [()]]


def _places(layouts: Sequence[Layout], dimension: int) -> Places:
    known: dict[tuple[MeshAxes, Window | None], int] = {}
    of = []
    for layout in layouts:
        key = layout.cuts[dimension], layout.windows[dimension] if layout.windows else None
        of.append(known.setdefault(key, len(known)))
    return Places([axes for axes, _ in known], [window for _, window in known], np.array(of, dtype=np.int64))


def lack_of(pairs: Sequence[Pair], shape: tuple[int, int], group: int) -> Lack:
    """For each of [sources, targets] what `group` positions need under the target and do not have under the source.

    Along one dimension blocks mostly either contain one another or do not meet. Where that is so for all dimensions,
    the position that has least has the product of what the dimensions' worst positions have; elsewhere all are asked.
    """
    least, regular = np.ones(shape), np.ones(shape, dtype=bool)
    need, dimensions = np.ones(shape[1]), np.zeros(shape, dtype=np.int64)
    tables = [_Overlap.of(pair, group) for pair in pairs]
    for pair, table in zip(pairs, tables, strict=True):
        least *= pair.spread(table.common.min(axis=2))
        regular &= pair.spread(table.regular)
        need *= table.need.max(axis=1)[pair.wanted.of]
        dimensions += pair.spread(np.any(table.need > table.common, axis=2))
    cells = math.prod(table.extent for table in tables)
    share = (need - least) / cells
    rows, columns = np.nonzero(~regular)
    if len(rows):
        needed, had = np.ones((len(rows), group)), np.ones((len(rows), group))
        for pair, table in zip(pairs, tables, strict=True):
            needed *= table.need[pair.wanted.of[columns]]
            had *= table.common[pair.held.of[rows], pair.wanted.of[columns]]
        share[rows, columns] = (needed - had).max(axis=1) / cells
    return Lack(share, dimensions)


@dataclass(frozen=True, slots=True, eq=False)
class _Overlap:
    """Along one dimension of `extent` cells what each position needs and has of it, for each pair of ways to cut it."""

    extent: int
    need: _Floats
    """[ways of targets, positions] cells."""
    common: _Floats
    """[ways of sources, ways of targets, positions] cells."""
    regular: NDArray[np.bool_]
    """[ways of sources, ways of targets]: whether all positions need as much and have all or nothing of some part."""

    @staticmethod
    def of(pair: Pair, group: int) -> _Overlap:
        """For `group` positions. Windows count in the dimension's own elements, even blocks in the fewest that do."""
        held, wanted, extent = pair.held, pair.wanted, pair.extent
        if not any(wanted.windows):
            extent = math.lcm(*map(degree_of, (*held.axes, *wanted.axes)))
        have_from, have_to = _ranges(held, group, extent)
        need_from, need_to = _ranges(wanted, group, extent)
        need = np.maximum(need_to - need_from, 0.0)
        ends = np.minimum(have_to[:, None], need_to[None])
        common = np.maximum(ends - np.maximum(have_from[:, None], need_from[None]), 0.0)
        most = common.max(axis=2, keepdims=True)
        regular = np.all((common == 0) | (common == most), axis=2) & np.all(need == need[:, :1], axis=1)
        return _Overlap(extent, need, common, regular)


def _ranges(places: Places, group: int, extent: int) -> tuple[_Floats, _Floats]:
    """Where the block of each position begins and ends within the dimension, [ways, positions]."""
    starts, stops = np.zeros((len(places.axes), group)), np.zeros((len(places.axes), group))
    positions = np.arange(group)
    for way, (axes, window) in enumerate(zip(places.axes, places.windows, strict=True)):
        even = extent // degree_of(axes)
        block = window or Window(even, 0, even)
        starts[way] = place_along(axes, positions) * block.step + block.offset
        stops[way] = starts[way] + block.length
    return np.maximum(starts, 0), np.minimum(stops, extent)
