"""Volume that the device lacking most lacks of a tensor, for all pairs of two sets of layouts: `ir/volume.py` as
tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxes, WindowedBlocks, cut_by_neighbours
from autopipe.passes.spmd.search.overlaps import Overlap, overlap_between

_Integers = NDArray[np.int64]

_AT_ONCE = 2048
"""Changes of layout whose positions are all asked at once: few enough to stay in a processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class MissingVolume:
    """Volume that devices lack, [sources, targets]."""

    share: NDArray[np.float64]
    """Of the device that lacks most, as a share of the whole tensor."""
    dimensions: _Integers
    """The number of dimensions along which a device lacks something."""


@dataclass(frozen=True, slots=True, eq=False)
class DimensionCuts:
    """The few ways in which layouts cut one dimension, and which of them each layout has."""

    axes: list[MeshAxes]
    windows: list[WindowedBlocks | None]
    of: _Integers

    def by_neighbours(self, size: int) -> DimensionCuts:
        """The same with each `size` neighbouring devices counted as one."""
        found = [cut_by_neighbours(*way, size) for way in zip(self.axes, self.windows, strict=True)]
        return DimensionCuts([axes for axes, _ in found], [window for _, window in found], self.of)


@dataclass(frozen=True, slots=True, eq=False)
class DimensionPair:
    """One dimension of `extent` cells: how sources cut it, and how targets do."""

    dimension: int
    held: DimensionCuts
    wanted: DimensionCuts
    extent: int

    def by_neighbours(self, size: int) -> DimensionPair:
        """The same with each `size` neighbouring devices counted as one (`ir/volume.py`)."""
        return replace(self, held=self.held.by_neighbours(size), wanted=self.wanted.by_neighbours(size))

    def spread(self, table: NDArray[Any]) -> NDArray[Any]:
        """A table of ways, [of sources, of targets], as one of layouts."""
        found: NDArray[Any] = table[self.held.of][:, self.wanted.of]
        return found


def pairs_by_dimension(sources: Sequence[Layout], targets: Sequence[Layout]) -> list[DimensionPair]:
    """Dimensions that some layout cuts."""
    found = (
        DimensionPair(place, _places(sources, place), _places(targets, place), extent)
        for place, extent in enumerate(targets[0].shape)
    )
    return [pair for pair in found if pair.held.axes != [()] or pair.wanted.axes != [()]]


def _places(layouts: Sequence[Layout], dimension: int) -> DimensionCuts:
    known: dict[tuple[MeshAxes, WindowedBlocks | None], int] = {}
    of = []
    for layout in layouts:
        key = layout.cuts[dimension], layout.windows[dimension] if layout.windows else None
        of.append(known.setdefault(key, len(known)))
    return DimensionCuts([axes for axes, _ in known], [window for _, window in known], np.array(of, dtype=np.int64))


def missing_volume(pairs: Sequence[DimensionPair], shape: tuple[int, int], group: int) -> MissingVolume:
    """For each of [sources, targets] what `group` positions need under the target and do not have under the source.

    Along one dimension blocks mostly either contain one another or do not meet. Where that is so for all dimensions,
    the position that has least has the product of what the dimensions' worst positions have; elsewhere all are asked.
    """
    least, regular = np.ones(shape), np.ones(shape, dtype=bool)
    need, dimensions = np.ones(shape[1]), np.zeros(shape, dtype=np.int64)
    overlaps = [_overlap_of(pair, group) for pair in pairs]
    for pair, overlap in zip(pairs, overlaps, strict=True):
        least *= pair.spread(overlap.least)
        if not overlap.regular.all():
            regular &= pair.spread(overlap.regular)
        need *= overlap.need.max(axis=1)[pair.wanted.of]
        dimensions += pair.spread(overlap.lacks)
    cells = math.prod(overlap.extent for overlap in overlaps)
    share = (need - least) / cells
    rows, columns = np.nonzero(~regular)
    needed = np.ones((shape[1], group))
    for pair, overlap in zip(pairs, overlaps, strict=True):
        needed *= overlap.need[pair.wanted.of]
    for start in range(0, len(rows), _AT_ONCE):
        row, column = rows[start : start + _AT_ONCE], columns[start : start + _AT_ONCE]
        had = np.ones((len(row), group))
        for pair, overlap in zip(pairs, overlaps, strict=True):
            had *= overlap.common[pair.held.of[row], pair.wanted.of[column]]
        share[row, column] = (needed[column] - had).max(axis=1) / cells
    return MissingVolume(share, dimensions)


def _overlap_of(pair: DimensionPair, group: int) -> Overlap:
    windows = any(pair.wanted.windows)
    held, wanted = (tuple(zip(each.axes, each.windows, strict=True)) for each in (pair.held, pair.wanted))
    return overlap_between(held, wanted, pair.extent if windows else 0, group)
