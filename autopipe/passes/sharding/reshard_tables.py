"""Volume that the device lacking most lacks of a tensor, for all pairs of two sets of layouts: `ir/layout.py` as
tables.

How shares are added up on the way from each of some layouts to each of others: `reductions` as tables.

What is scattered along a dimension follows from how both layouts cut it and from who holds shares. Of these there are
few, so pairs of layouts are told apart by numbers, and what adds shares up is worked out once for those that are alike.

Cost of every change between two sets of layouts: `cost/relayout.py` as tables. The part of a tensor that a device
lacks depends on how both layouts cut it, not on its extents (but for windows). So a change of layout costs seconds at
once and seconds a byte of the whole tensor, and tensors cut alike share one table.

Values that several nodes read: each is a variable of its own, the layout in which its readers find it.

So a change of layout that several readers share is paid once. A value goes from the layout in which its node leaves it
to the hub's, and from there to each reader's.

Cost of adding up partial sums: collectives one after the other, for tensors of any size.

Overlap of what devices hold and need along one dimension, for all ways to cut it.

From what a node leaves to what its readers want: shares are added up on the way, as lowering does it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster
from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    WindowedBlocks,
    cut_by_neighbours,
    degree_of,
    merged,
    place_along,
    replicated,
)
from autopipe.passes.analysis.resharding import is_chain, is_cut_further, scattered_along, without
from autopipe.passes.cost.communication import FREE, Cost, moving_lines, reduction_cost
from autopipe.passes.sharding.configurations import Integers, TensorLayouts, distinct, numbered

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
        """The same with each `size` neighbouring devices counted as one (`ir/layout.py`)."""
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


Addition = tuple[tuple[str, MeshAxes, int], ...]
"""The collectives that add up shares: kind, over which axes, and into how many parts the tensor is cut before."""


@dataclass(frozen=True, slots=True, eq=False)
class SumReduction:
    """Cost of several reductions: step after step, each the cheapest of its ways."""

    parts: _Floats
    """[steps, additions] into how many the tensor is cut before."""
    fixed_s: _Floats
    """[steps, additions, ways]"""
    per_byte_s: _Floats
    """[steps, additions, ways]"""

    def seconds(self, size_bytes: float) -> _Floats:
        """For a tensor of `size_bytes` in all."""
        found: _Floats = np.zeros(self.parts.shape[1])
        if size_bytes > 0:
            for parts, fixed, per_byte in zip(self.parts, self.fixed_s, self.per_byte_s, strict=True):
                found += (fixed + per_byte * (size_bytes / parts)[:, None]).min(axis=1)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Collectives:
    """Costs of collectives along the axes of the mesh of `devices`, worked out once each."""

    cluster: Cluster
    devices: tuple[int, ...]
    _known: dict[tuple[str, MeshAxes], Cost] = field(default_factory=dict)

    def adding(self, additions: Sequence[Addition]) -> SumReduction:
        """Cost of each of `additions`."""
        steps = max(map(len, additions))
        keys = dict.fromkeys((kind, over) for each in additions for kind, over, _ in each)
        costs = [FREE, *map(self._cost, keys)]
        numbers = {key: number for number, key in enumerate(keys, 1)}
        which = np.zeros((steps, len(additions)), dtype=np.int64)
        parts = np.ones(which.shape)
        for column, each in enumerate(additions):
            for row, (kind, over, count) in enumerate(each):
                which[row, column], parts[row, column] = numbers[kind, over], count
        figures = np.zeros((2, len(costs), max(len(cost.ways) for cost in costs)))
        figures[0] = np.inf
        for number, cost in enumerate(costs):
            for place, way in enumerate(cost.ways):
                figures[:, number, place] = way.fixed_s, way.per_byte_s
        return SumReduction(parts, figures[0][which], figures[1][which])

    def _cost(self, key: tuple[str, MeshAxes]) -> Cost:
        if key not in self._known:
            self._known[key] = reduction_cost(self.cluster, self.devices, *key)
        return self._known[key]


@dataclass(frozen=True, slots=True, eq=False)
class ReductionPaths:
    """How each source comes to each target: what adds up its shares, and what is held after that."""

    additions: list[Addition]
    held: list[Layout]
    addition_of: Integers
    """[sources, targets]"""
    held_of: Integers
    """[sources, targets]"""


@dataclass(frozen=True, slots=True, eq=False)
class _Scattered:
    """Along one dimension: `insides` are the axes along which shares are scattered, the first of them none."""

    pair: DimensionPair
    insides: list[MeshAxes]
    of: Integers
    """Which of them, [sources, ways of targets]."""


def reduction_paths(sources: Sequence[Layout], targets: Sequence[Layout]) -> ReductionPaths:
    """How the shares of each of `sources` are added up on the way to each of `targets`, which are even and hold none.

    A target's axes cut one dimension each, so what is scattered along one does not depend on the others.
    """
    shares, shares_of = numbered(source.partial_over for source in sources)
    parts, parts_of = numbered(source.parts for source in sources)
    scattered = [_scattered(pair, shares, shares_of) for pair in pairs_by_dimension(sources, targets)]
    codes = np.zeros((len(sources), len(targets)), dtype=np.int64)
    for each in scattered:
        codes = codes * len(each.insides) + each.of[:, each.pair.wanted.of]
    known, codes = distinct(codes)
    cases, case_of = distinct(codes + np.arange(len(sources))[:, None] * len(known))
    row, left = cases // len(known), known[cases % len(known)]
    digits: list[Integers] = []
    for each in reversed(scattered):
        digits.insert(0, left % len(each.insides))
        left = left // len(each.insides)
    _, adding_of = distinct((shares_of[row] * len(parts) + parts_of[row]) * len(known) + cases % len(known))
    one_each = np.zeros(adding_of.max() + 1, dtype=np.int64)
    one_each[adding_of] = np.arange(len(cases))
    additions = [
        _addition(shares[of], parts[count], [each.insides[digit] for each, digit in zip(scattered, own, strict=True)])
        for of, count, *own in np.stack([shares_of[row], parts_of[row], *digits])[:, one_each].T.tolist()
    ]
    held, held_of = _held(targets[0].shape, scattered, row, digits)
    return ReductionPaths(additions, held, adding_of[case_of], held_of[case_of])


def _scattered(pair: DimensionPair, shares: Sequence[MeshAxes], shares_of: Integers) -> _Scattered:
    insides: dict[MeshAxes, int] = {(): 0}
    cases, case_of = distinct(pair.held.of * len(shares) + shares_of)
    table = np.zeros((len(cases), len(pair.wanted.axes)), dtype=np.int64)
    for place, (now, over) in enumerate(zip(*(each.tolist() for each in np.divmod(cases, len(shares))), strict=True)):
        if shares[over]:
            found = (scattered_along(pair.held.axes[now], wanted, shares[over]) for wanted in pair.wanted.axes)
            table[place] = [insides.setdefault(axes, len(insides)) for axes in found]
    return _Scattered(pair, list(insides), table[case_of])


def _addition(shares: MeshAxes, parts: int, insides: Iterable[MeshAxes]) -> Addition:
    """Reduction that adds up `shares` of a tensor in `parts` blocks, scattered along `insides` of a dimension each."""
    steps = []
    for inside in filter(None, insides):
        steps.append(("reduce_scatter", inside, parts))
        shares = without(shares, inside)
        parts *= degree_of(inside)
    if shares:
        steps.append(("all_reduce", merged(shares), parts))
    return tuple(steps)


def _held(
    shape: tuple[int, ...], scattered: Sequence[_Scattered], row: Integers, digits: Sequence[Integers]
) -> tuple[list[Layout], Integers]:
    """The different layouts after shares have been scattered, and which of them each case has."""
    codes = np.zeros_like(row)
    ways: list[list[MeshAxes]] = []
    for each, digit in zip(scattered, digits, strict=True):
        pairs, pair_of = distinct(each.pair.held.of[row] * len(each.insides) + digit)
        before, inside = (found.tolist() for found in np.divmod(pairs, len(each.insides)))
        cuts, cut_of = numbered(
            merged(each.pair.held.axes[now] + each.insides[more]) for now, more in zip(before, inside, strict=True)
        )
        codes = codes * len(cuts) + cut_of[pair_of]
        ways.append(cuts)
    found, held_of = np.unique(codes, return_inverse=True)
    layouts = []
    for code in found.tolist():
        own: list[MeshAxes] = [()] * len(shape)
        for each, cuts in zip(reversed(scattered), reversed(ways), strict=True):
            code, place = divmod(code, len(cuts))
            own[each.pair.dimension] = cuts[place]
        layouts.append(Layout(shape, tuple(own)))
    return layouts, held_of.reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Seconds of changes of layout, with what has to be added up before."""

    moves: ReshardTable
    collectives: Collectives
    _ways: dict[Hashable, tuple[ReductionPaths, SumReduction]] = field(default_factory=dict)

    def to_reader(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """From each of `sources`, shares of sums among them, to each of `targets`, which nobody but it wants.

        Shares are scattered where the target cuts further. Of a tensor of `size_bytes`; [sources, targets].
        """
        if not any(source.is_partial for source in sources):
            return self.moves.seconds(sources, targets, size_bytes)
        evens = [target.even() for target in targets]
        key = tuple([(each.cuts, each.sums, each.means) for each in sources]), tuple([each.cuts for each in evens])
        if key not in self._ways:
            found = reduction_paths(sources, evens)
            self._ways[key] = found, self.collectives.adding(found.additions)
        ways, adding = self._ways[key]
        moving = self.moves.seconds(ways.held, targets, size_bytes)
        return adding.seconds(size_bytes)[ways.addition_of] + np.take_along_axis(moving, ways.held_of, axis=0)

    def to_all(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """The same where others want the value, too: shares are added up to copies first."""
        moving = self.moves.seconds([each.reduced() for each in sources], targets, size_bytes)
        return self.to_copies(sources, size_bytes)[:, None] + moving

    def to_copies(self, sources: Sequence[Layout], size_bytes: float) -> Floats:
        """Cost of adding up the partial sums of each of `sources`, cut as they are."""
        return self.collectives.adding([_all_reduced(each) for each in sources]).seconds(size_bytes)


def _all_reduced(layout: Layout) -> Addition:
    return (("all_reduce", layout.partial_over, layout.parts),) if layout.is_partial else ()


@dataclass(frozen=True, slots=True, eq=False)
class SharedValue:
    """A variable for a value: its layouts, and what they cost with the source's and the readers' configurations."""

    layouts: tuple[Layout, ...]
    from_source: Floats
    """[configurations of the source, layouts] seconds; of a parameter there is no source: [0, layouts]."""
    to_readers: tuple[Floats, ...]
    """For each reader [layouts, its configurations]; inf where they do not go together. Equal readers share them."""

    def times(self, factor: float) -> SharedValue:
        """The same `factor` times."""
        made = {id(each): each * factor for each in self.to_readers}
        return SharedValue(self.layouts, self.from_source * factor, tuple(made[id(each)] for each in self.to_readers))


def shared_value(
    source: TensorLayouts, readers: Sequence[TensorLayouts], size_bytes: float, changes: Changes, given: bool
) -> SharedValue:
    """The hub of a computed value of `size_bytes`; `given` says whether others want it besides `readers`.

    Lowering scatters shares of sums only to what all readers want alike: hence a second set of the layouts wanted by
    all, which cost less to come to and cannot be left.
    """
    held = [layout.reduced() for layout in source.layouts]
    free = list(dict.fromkeys([*held, *(layout.even() for reader in readers for layout in reader.layouts)]))
    bound: list[Layout] = []
    if not given and any(layout.is_partial for layout in source.layouts):
        evens = [{layout.even() for layout in reader.layouts} for reader in readers]
        bound = [layout for layout in free if all(layout in even for even in evens)]
    into = [changes.to_all(source.layouts, free, size_bytes)]
    if bound:
        into.append(changes.to_reader(source.layouts, bound, size_bytes))
    out: dict[int, Floats] = {}
    for reader in readers:
        if id(reader) in out:
            continue
        moving = [changes.moves.seconds(free, reader.layouts, size_bytes)]
        if bound:
            of_equal = changes.moves.seconds(bound, reader.layouts, size_bytes)
            moving.append(of_equal + _only_equal(bound, [layout.even() for layout in reader.layouts]))
        out[id(reader)] = np.concatenate(moving)[:, reader.of]
    to_readers = tuple(out[id(reader)] for reader in readers)
    return SharedValue((*free, *bound), np.concatenate(into, axis=1)[source.of], to_readers)


def shared_parameter(readers: Sequence[TensorLayouts], shape: tuple[int, ...], only_whole: bool) -> SharedValue:
    """The hub of a parameter: held in the one layout that all its readers want, or whole and cut for free."""
    whole = replicated(shape)
    wanted = dict.fromkeys(layout for reader in readers for layout in reader.layouts)
    common = [each for each in wanted if each != whole and all(each in reader.layouts for reader in readers)]
    if only_whole:
        common = []
    out = tuple(
        np.concatenate([np.zeros((1, len(reader.layouts))), _only_equal(common, reader.layouts)])[:, reader.of]
        for reader in readers
    )
    return SharedValue((whole, *common), np.zeros((0, 1 + len(common))), out)


def _only_equal(layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Floats:
    """0 where both are the same, else inf."""
    rows = {layout: row for row, layout in enumerate(layouts)}
    found = np.full((len(layouts), len(wanted)), np.inf)
    for column, layout in enumerate(wanted):
        if layout in rows:
            found[rows[layout], column] = 0.0
    return found
