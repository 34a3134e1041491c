"""What every change between two sets of layouts takes, all at once: `cost/relayout.py` as tables.

The part of a tensor that a device lacks depends on how both layouts cut it, not on its extents. So a change of layout
costs seconds at once and seconds a byte of the whole tensor, and tensors cut alike share one table of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster
from autopipe.ir.layout import Layout, MeshAxes, MeshAxis, degree_of
from autopipe.ir.volume import of_neighbours
from autopipe.passes.cost.relayout import link_levels
from autopipe.passes.lower.relayout import steps_between

Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
_Truths = NDArray[np.bool_]
_Cuts = tuple[MeshAxes, ...]
"""The axes that cut each dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Seconds of changes of layout on a group of `devices`; tables are made once for all tensors cut alike."""

    cluster: Cluster
    devices: tuple[int, ...]
    _known: dict[Any, tuple[Floats, Floats]] = field(default_factory=dict)

    def seconds(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """Seconds from each of `sources`, which hold no shares of sums, to each of `targets`; [sources, targets].

        The tensor has `size_bytes` in all. Each entry is the sum of `relayout_seconds` over `steps_between`.
        """
        key = tuple(layout.cuts for layout in sources), tuple(layout.cuts for layout in targets)
        if key not in self._known:
            self._known[key] = self._affine(*key)
        fixed, per_byte = self._known[key]
        return fixed + per_byte * size_bytes

    def _affine(self, sources: Sequence[_Cuts], targets: Sequence[_Cuts]) -> tuple[Floats, Floats]:
        """Seconds at once and a byte of the tensor, for each pair."""
        fixed = np.zeros((len(sources), len(targets)))
        per_byte = np.zeros_like(fixed)
        apart = _gathers_apart(sources, targets, len(self.devices))
        for size, link in link_levels(self.cluster, self.devices):
            lack = _Lack.of(_seen_by(sources, size), _seen_by(targets, size), len(self.devices) // size)
            fixed += np.where(apart, lack.dimensions, lack.share > 0) * link.latency_s
            per_byte += lack.share / link.bandwidth_bytes_per_s
        return fixed, per_byte


def _seen_by(cuts: Sequence[_Cuts], size: int) -> list[_Cuts]:
    """The same as each `size` neighbours hold it together."""
    return [of_neighbours(Layout((1,) * len(each), each), size).cuts for each in cuts]


@dataclass(frozen=True, slots=True, eq=False)
class _Lack:
    """What the device that lacks most lacks of a tensor, for each pair of layouts."""

    share: Floats
    """As a share of the whole tensor."""
    dimensions: _Integers
    """The number of dimensions along which a device lacks something."""

    @staticmethod
    def of(sources: Sequence[_Cuts], targets: Sequence[_Cuts], group: int) -> _Lack:
        """For layouts that cut as `sources` and `targets` say, over `group` positions."""
        shape = len(sources), len(targets)
        need = np.ones(len(targets), dtype=np.int64)
        common = np.ones((*shape, group), dtype=np.int64)
        dimensions = np.zeros(shape, dtype=np.int64)
        grid = 1
        for held, wanted in _by_dimension(sources, targets):
            extent, wanted_extent, overlap = _overlaps(held.kinds, wanted.kinds, group)
            short: _Truths = np.any(wanted_extent[None, :, None] > overlap, axis=2)
            dimensions += short[held.of][:, wanted.of]
            common *= overlap[held.of][:, wanted.of]
            need *= wanted_extent[wanted.of]
            grid *= extent
        share = (need - common.min(axis=2)) / grid
        return _Lack(share, dimensions)


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """The different ways in which layouts cut one dimension, and which of them each layout has."""

    kinds: list[MeshAxes]
    of: _Integers

    @staticmethod
    def found(cuts: Sequence[_Cuts], dimension: int) -> _Kinds:
        known: dict[MeshAxes, int] = {}
        places = [known.setdefault(each[dimension], len(known)) for each in cuts]
        return _Kinds(list(known), np.array(places, dtype=np.int64))


def _by_dimension(sources: Sequence[_Cuts], targets: Sequence[_Cuts]) -> list[tuple[_Kinds, _Kinds]]:
    """For each dimension that any layout cuts the ways in which sources and targets do."""
    found = [(_Kinds.found(sources, place), _Kinds.found(targets, place)) for place in range(len(sources[0]))]
    return [(held, wanted) for held, wanted in found if held.kinds != [()] or wanted.kinds != [()]]


def _overlaps(held: list[MeshAxes], wanted: list[MeshAxes], group: int) -> tuple[int, _Integers, _Integers]:
    """A dimension's extent in cells, the wanted blocks' extents, and what each position has of its wanted block."""
    extent = math.lcm(*map(degree_of, (*held, *wanted)))
    have, need = (np.array([extent // degree_of(axes) for axes in each]) for each in (held, wanted))
    have_from = np.array([_places(axes, group) for axes in held]) * have[:, None]
    need_from = np.array([_places(axes, group) for axes in wanted]) * need[:, None]
    ends = np.minimum((have_from + have[:, None])[:, None], (need_from + need[:, None])[None])
    return extent, need, np.maximum(ends - np.maximum(have_from[:, None], need_from[None]), 0)


def _places(axes: MeshAxes, group: int) -> _Integers:
    """Which block of those that `axes` make each position has."""
    positions = np.arange(group)
    index = np.zeros(group, dtype=np.int64)
    for axis in axes:
        index = index * axis.degree + positions // axis.stride % axis.degree
    return index


def _gathers_apart(sources: Sequence[_Cuts], targets: Sequence[_Cuts], group: int) -> _Truths:
    """Which pairs are made by cutting and then gathering one dimension after the other (see `steps_between`)."""
    divisors = [count for count in range(1, group + 1) if group % count == 0]
    apart = _nested(sources, targets, divisors)
    leaving = np.zeros(apart.shape, dtype=np.int64)
    wanted_marks = np.zeros(len(targets), dtype=np.int64)
    for held, wanted in _by_dimension(sources, targets):
        gathers = np.array([[_one_way(have, want, "all_gather") for want in wanted.kinds] for have in held.kinds])
        cuts = np.array([[_one_way(have, want, "slice") for want in wanted.kinds] for have in held.kinds])
        has = np.array([_marks(axes, divisors) for axes in held.kinds], dtype=np.int64)
        wants = np.array([_marks(axes, divisors) for axes in wanted.kinds], dtype=np.int64)
        left = np.where(gathers, has[:, None] & ~wants[None], 0)
        apart &= (gathers | cuts)[held.of][:, wanted.of]
        leaving |= left[held.of][:, wanted.of]
        wanted_marks |= wants[wanted.of]
    found: _Truths = np.logical_and(apart, leaving & wanted_marks == 0)
    return found


def _one_way(have: MeshAxes, want: MeshAxes, kind: str) -> bool:
    """Whether one dimension comes from `have` to `want` by steps of that kind alone, or none."""
    extent = math.lcm(degree_of(have), degree_of(want))
    steps = steps_between(Layout((extent,), (have,)), Layout((extent,), (want,)))
    return all(step.kind == kind for step in steps)


def _marks(axes: Sequence[MeshAxis], divisors: Sequence[int]) -> int:
    """A bit for each divisor d of the group with stride ≤ d < stride · degree: axes that nest and meet share one."""
    return sum(
        1 << place
        for place, count in enumerate(divisors)
        if any(axis.stride <= count < axis.stride * axis.degree for axis in axes)
    )


def _nested(sources: Sequence[_Cuts], targets: Sequence[_Cuts], divisors: Sequence[int]) -> _Truths:
    """Which pairs' axes begin and end at strides of which each divides the next."""

    def bounds(cuts: Sequence[_Cuts]) -> _Integers:
        each = ({bound for axes in one for axis in axes for bound in _ends(axis)} for one in cuts)
        return np.array([sum(1 << divisors.index(bound) for bound in found) for found in each], dtype=np.int64)

    together = bounds(sources)[:, None] | bounds(targets)[None]
    known, places = np.unique(together, return_inverse=True)
    nests = [_is_chain([count for place, count in enumerate(divisors) if mark >> place & 1]) for mark in known.tolist()]
    found: _Truths = np.array(nests, dtype=bool)[places.reshape(together.shape)]
    return found


def _ends(axis: MeshAxis) -> tuple[int, int]:
    return axis.stride, axis.stride * axis.degree


def _is_chain(bounds: Sequence[int]) -> bool:
    return all(large % small == 0 for small, large in itertools.pairwise(bounds))
