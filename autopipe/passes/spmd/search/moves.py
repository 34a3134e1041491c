"""Cost of every change between two sets of layouts: `cost/relayout.py` as tables. The part of a tensor that a device
lacks depends on how both layouts cut it, not on its extents (but for windows). So a change of layout costs seconds at
once and seconds a byte of the whole tensor, and tensors cut alike share one table.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster
from autopipe.ir.layout import Layout, MeshAxes
from autopipe.passes.analysis.resharding import is_chain, is_cut_further
from autopipe.passes.cost.communication import moving_lines
from autopipe.passes.spmd.search.lack import DimensionPair, missing_volume, pairs_by_dimension

Floats = NDArray[np.float64]
_Truths = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ReshardTable:
    """Seconds of changes of layout on a group of `devices`; tables are made once for all tensors cut alike."""

    cluster: Cluster
    devices: tuple[int, ...]
    _known: dict[Hashable, tuple[Floats, Floats]] = field(default_factory=dict)

    def seconds(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """Seconds from each of `sources`, which hold no shares of sums, to each of `targets`; [sources, targets].

        The tensor has `size_bytes` in all. Each entry is the sum of `relayout_seconds` over `steps_between`.
        """
        windows = tuple(layout.windows for layout in targets)
        shape = targets[0].shape if any(windows) else ()
        key = tuple(layout.cuts for layout in sources), tuple(layout.cuts for layout in targets), windows, shape
        if key not in self._known:
            self._known[key] = self._affine(sources, targets)
        fixed, per_byte = self._known[key]
        return fixed + per_byte * size_bytes

    def _affine(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[Floats, Floats]:
        """Seconds at once and a byte of the tensor, for each pair."""
        shape = len(sources), len(targets)
        pairs = pairs_by_dimension(sources, targets)
        fixed, per_byte = np.zeros(shape), np.zeros(shape)
        apart = _gathers_apart(pairs, shape, len(self.devices))
        apart &= np.array([not layout.windows for layout in targets])
        for size, line in moving_lines(self.cluster, self.devices):
            lack = missing_volume([pair.by_neighbours(size) for pair in pairs], shape, len(self.devices) // size)
            fixed += np.where(apart, lack.dimensions, lack.share > 0) * line.fixed_s
            per_byte += lack.share * line.per_byte_s
        return fixed, per_byte


def _gathers_apart(pairs: Sequence[DimensionPair], shape: tuple[int, int], group: int) -> _Truths:
    """Which of [sources, targets] are made by cutting and then gathering one dimension after the other.

    See `steps_between`.
    """
    divisors = tuple(count for count in range(1, group + 1) if group % count == 0)
    apart = _nested(pairs, shape, divisors)
    leaving = np.zeros(shape, dtype=np.int64)
    wanted_marks = np.zeros(shape[1], dtype=np.int64)
    for pair in pairs:
        cut, gathered = _cut_further(tuple(pair.held.axes), tuple(pair.wanted.axes))
        has, wants = (np.array([_marks(axes, divisors) for axes in each.axes]) for each in (pair.held, pair.wanted))
        left = np.where(gathered, has[:, None] & ~wants[None], 0)
        apart &= pair.spread(cut | gathered)
        leaving |= pair.spread(left)
        wanted_marks |= wants[pair.wanted.of]
    found: _Truths = np.logical_and(apart, leaving & wanted_marks == 0)
    return found


@lru_cache(maxsize=1024)
def _cut_further(held: tuple[MeshAxes, ...], wanted: tuple[MeshAxes, ...]) -> tuple[_Truths, _Truths]:
    """Which of `wanted` cut each of `held` further, and of which `held` do; nothing may be written to either."""
    cut = np.array([[is_cut_further(have, want) for want in wanted] for have in held])
    gathered = np.array([[is_cut_further(want, have) for want in wanted] for have in held])
    return cut, gathered


@lru_cache(maxsize=1 << 16)
def _marks(axes: MeshAxes, divisors: tuple[int, ...]) -> int:
    """A bit for each divisor d of the group with stride ≤ d < stride · degree: axes that nest and meet share one."""
    return sum(
        1 << place
        for place, count in enumerate(divisors)
        if any(axis.stride <= count < axis.stride * axis.degree for axis in axes)
    )


def _nested(pairs: Sequence[DimensionPair], shape: tuple[int, int], divisors: tuple[int, ...]) -> _Truths:
    """Which pairs' axes begin and end at strides of which each divides the next."""
    together = np.zeros(shape, dtype=np.int64)
    for pair in pairs:
        held, wanted = (np.array([_bounds(axes, divisors) for axes in each.axes]) for each in (pair.held, pair.wanted))
        together |= pair.spread(held[:, None] | wanted[None])
    known, places = np.unique(together, return_inverse=True)
    nests = [is_chain([count for place, count in enumerate(divisors) if mark >> place & 1]) for mark in known.tolist()]
    found: _Truths = np.array(nests, dtype=bool)[places.reshape(together.shape)]
    return found


@lru_cache(maxsize=1 << 16)
def _bounds(axes: MeshAxes, divisors: tuple[int, ...]) -> int:
    """A bit for each divisor of the group at which an axis begins or ends."""
    ends = {end for axis in axes for end in (axis.stride, axis.stride * axis.degree)}
    return sum(1 << divisors.index(end) for end in ends)
