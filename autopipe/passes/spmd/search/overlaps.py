"""Overlap of what devices hold and need along one dimension, for all ways to cut it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import MeshAxes, WindowedBlocks, degree_of, place_along

Way = tuple[MeshAxes, WindowedBlocks | None]
"""How a dimension is cut, and through which windows its blocks are read, if through any."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Along one dimension of `extent` cells what each position needs and has of it, for each pair of ways to cut it."""

    extent: int
    need: _Floats
    """[ways of targets, positions] cells."""
    common: _Floats
    """[ways of sources, ways of targets, positions] cells."""
    least: _Floats
    """[ways of sources, ways of targets]: the fewest cells that a position has."""
    lacks: NDArray[np.bool_]
    """[ways of sources, ways of targets]: whether a position lacks any."""
    regular: NDArray[np.bool_]
    """[ways of sources, ways of targets]: whether all positions need as much and have all or nothing of some part."""


@lru_cache(maxsize=1024)
def overlap_between(held: tuple[Way, ...], wanted: tuple[Way, ...], extent: int, group: int) -> Overlap:
    """For `group` positions, of which nothing may be written to: many tensors are cut alike along some dimension.

    Windows count in the `extent` elements of the dimension, even blocks (extent 0) in the fewest cells that do.
    """
    cells = extent or math.lcm(*(degree_of(axes) for axes, _ in (*held, *wanted)))
    have_from, have_to = _ranges(held, group, cells)
    need_from, need_to = _ranges(wanted, group, cells)
    need = np.maximum(need_to - need_from, 0.0)
    ends = np.minimum(have_to[:, None], need_to[None])
    common = np.maximum(ends - np.maximum(have_from[:, None], need_from[None]), 0.0)
    most = common.max(axis=2, keepdims=True)
    regular = np.all((common == 0) | (common == most), axis=2) & np.all(need == need[:, :1], axis=1)
    return Overlap(cells, need, common, common.min(axis=2), np.any(need > common, axis=2), regular)


def _ranges(ways: Sequence[Way], group: int, extent: int) -> tuple[_Floats, _Floats]:
    """Where the block of each position begins and ends within the dimension, [ways, positions]."""
    starts, stops = np.zeros((len(ways), group)), np.zeros((len(ways), group))
    positions = np.arange(group)
    for number, (axes, window) in enumerate(ways):
        even = extent // degree_of(axes)
        block = window or WindowedBlocks(even, 0, even)
        starts[number] = place_along(axes, positions) * block.step + block.offset
        stops[number] = starts[number] + block.length
    return np.maximum(starts, 0), np.minimum(stops, extent)
