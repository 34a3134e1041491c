"""Cost of every change between two sets of layouts, as tables: PaSE's t_x, `analysis/resharding`
for all pairs at once.

The part of a tensor that a device lacks depends on how both layouts cut it, not on its extents (but
for windows): a change costs seconds at once and seconds a byte, and tensors cut alike share one
table. Each dimension is cut in one of few ways: pairs of layouts are told apart by numbers, and
what they have in common is worked out once.
"""

from __future__ import annotations

import itertools
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
    WindowedShards,
    coordinate_along,
    degree_of,
    merge_axes,
    replicated,
    sharded_over_neighbours,
)
from autopipe.passes.analysis.resharding import (
    are_nested,
    is_sharded_further,
    reduce_scatter_axes,
    without_axes,
)
from autopipe.passes.cost.communication import FREE, Cost, moving_lines, reduction_cost
from autopipe.passes.sharding.configurations import (
    Integers,
    TensorLayouts,
    combined,
    distinct,
    numbered,
)

Floats = NDArray[np.float64]
_Truths = NDArray[np.bool_]

Way = tuple[MeshAxes, WindowedShards | None]
"""How a dimension is cut, and through which windows its blocks are read, if through any."""


@dataclass(frozen=True, slots=True, eq=False)
class DimensionPair:
    """One dimension of `extent` cells: the few ways in which sources hold and targets want it cut,
    and which of them each layout has.
    """

    dimension: int
    extent: int
    held: tuple[Way, ...]
    held_of: Integers
    wanted: tuple[Way, ...]
    wanted_of: Integers

    def by_neighbours(self, size: int) -> DimensionPair:
        """The same with each `size` neighbouring devices counted as one (`ir/layout.py`)."""
        held, wanted = (
            tuple(sharded_over_neighbours(*way, size) for way in ways)
            for ways in (self.held, self.wanted)
        )
        return replace(self, held=held, wanted=wanted)

    def spread(self, table: NDArray[Any]) -> NDArray[Any]:
        """A table of ways, [of sources, of targets], as one of layouts."""
        found: NDArray[Any] = table[self.held_of][:, self.wanted_of]
        return found


def _pairs_by_dimension(
    sources: Sequence[Layout], targets: Sequence[Layout]
) -> list[DimensionPair]:
    """Dimensions that some layout cuts."""
    found = []
    for place, extent in enumerate(targets[0].shape):
        (held, held_of), (wanted, wanted_of) = (
            numbered(
                (each.shard_axes[place], each.windows[place] if each.windows else None)
                for each in layouts
            )
            for layouts in (sources, targets)
        )
        if any(axes for axes, _ in (*held, *wanted)):
            found.append(
                DimensionPair(place, extent, tuple(held), held_of, tuple(wanted), wanted_of)
            )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Overlap:
    """Along one dimension of `extent` cells what each position needs and has of it, for each pair
    of ways to cut it. `least` is the fewest cells that a position has, `lacks` true where one lacks
    any, `regular` where all need as much and have all or nothing of some part; of all three [ways
    of sources, ways of targets].
    """

    extent: int
    need: Floats
    """[ways of targets, positions] cells."""
    common: Floats
    """[ways of sources, ways of targets, positions] cells."""
    least: Floats
    lacks: _Truths
    regular: _Truths


@lru_cache(maxsize=1024)
def _overlap_between(
    held: tuple[Way, ...], wanted: tuple[Way, ...], extent: int, group: int
) -> _Overlap:
    """For `group` positions, of which nothing may be written to: many tensors are cut alike along
    some dimension. Windows count in the `extent` elements of the dimension, even blocks (extent 0)
    in the fewest cells that do.
    """
    cells = extent or math.lcm(*(degree_of(axes) for axes, _ in (*held, *wanted)))
    positions = np.arange(group)

    def ranges(ways: tuple[Way, ...]) -> tuple[Floats, Floats]:
        """Where the block of each position begins and ends within the dimension, [ways,
        positions].
        """
        starts = np.zeros((len(ways), group))
        stops = np.zeros((len(ways), group))
        for number, (axes, window) in enumerate(ways):
            even = cells // degree_of(axes)
            block = window or WindowedShards(even, 0, even)
            starts[number] = coordinate_along(axes, positions) * block.step + block.offset
            stops[number] = starts[number] + block.length
        return np.maximum(starts, 0), np.minimum(stops, cells)

    have_from, have_to = ranges(held)
    need_from, need_to = ranges(wanted)
    need = np.maximum(need_to - need_from, 0.0)
    ends = np.minimum(have_to[:, None], need_to[None])
    common = np.maximum(ends - np.maximum(have_from[:, None], need_from[None]), 0.0)
    most = common.max(axis=2, keepdims=True)
    regular = np.all((common == 0) | (common == most), axis=2) & np.all(need == need[:, :1], axis=1)
    return _Overlap(cells, need, common, common.min(axis=2), np.any(need > common, axis=2), regular)


_AT_ONCE = 2048
"""Changes of layout whose positions are all looked at together: few enough to stay in a processor's
cache.
"""


def _missing_volume(
    pairs: Sequence[DimensionPair], shape: tuple[int, int], group: int
) -> tuple[Floats, Integers]:
    """Volume that `group` positions need under the target and do not have under the source,
    [sources, targets].

    That is PaSE's t_x(u, v), the largest |A(v, d)| - |A(v, d) ∩ A(u, d)| of any device d, as a
    share of the whole tensor; and the number of dimensions along which a device lacks something.
    Along one dimension blocks mostly either contain one another or do not meet. Where that is so
    for all dimensions, the position that has least has the product of what the dimensions' worst
    positions have; elsewhere all are looked at.
    """
    least = np.ones(shape)
    regular = np.ones(shape, dtype=bool)
    need = np.ones(shape[1])
    dimensions = np.zeros(shape, dtype=np.int64)
    overlaps = []
    for pair in pairs:
        windows = any(window for _, window in pair.wanted)
        overlap = _overlap_between(pair.held, pair.wanted, pair.extent if windows else 0, group)
        overlaps.append(overlap)
        least *= pair.spread(overlap.least)
        if not overlap.regular.all():
            regular &= pair.spread(overlap.regular)
        need *= overlap.need.max(axis=1)[pair.wanted_of]
        dimensions += pair.spread(overlap.lacks)
    cells = math.prod(overlap.extent for overlap in overlaps)
    share = (need - least) / cells
    rows, columns = np.nonzero(~regular)
    needed = np.ones((shape[1], group))
    for pair, overlap in zip(pairs, overlaps, strict=True):
        needed *= overlap.need[pair.wanted_of]
    for start in range(0, len(rows), _AT_ONCE):
        row = rows[start : start + _AT_ONCE]
        column = columns[start : start + _AT_ONCE]
        had = np.ones((len(row), group))
        for pair, overlap in zip(pairs, overlaps, strict=True):
            had *= overlap.common[pair.held_of[row], pair.wanted_of[column]]
        share[row, column] = (needed[column] - had).max(axis=1) / cells
    return share, dimensions


def _gathers_apart(pairs: Sequence[DimensionPair], shape: tuple[int, int], group: int) -> _Truths:
    """Which of [sources, targets] are made by cutting and then gathering one dimension after the
    other. As `redistribution_steps` finds them: each dimension is cut further or gathered; all axes begin
    and end at strides of which each divides the next; and no axis that is left is one that a target
    cuts another dimension by.
    """
    divisors = tuple(count for count in range(1, group + 1) if group % count == 0)
    apart = np.ones(shape, dtype=bool)
    ends = np.zeros(shape, dtype=np.int64)
    leaving = np.zeros(shape, dtype=np.int64)
    wanted_marks = np.zeros(shape[1], dtype=np.int64)
    for pair in pairs:
        held, wanted = (tuple(axes for axes, _ in ways) for ways in (pair.held, pair.wanted))
        cut, gathered = _cut_further(held, wanted)
        has, wants = (
            np.array([_marks(axes, divisors) for axes in ways]) for ways in (held, wanted)
        )
        from_, to = (
            np.array([_bounds(axes, divisors) for axes in ways]) for ways in (held, wanted)
        )
        ends |= pair.spread(from_[:, None] | to[None])
        apart &= pair.spread(cut | gathered)
        leaving |= pair.spread(np.where(gathered, has[:, None] & ~wants[None], 0))
        wanted_marks |= wants[pair.wanted_of]
    known, places = np.unique(ends, return_inverse=True)
    nests = [
        are_nested([count for place, count in enumerate(divisors) if mark >> place & 1])
        for mark in known.tolist()
    ]
    apart &= np.array(nests, dtype=bool)[places.reshape(ends.shape)]
    found: _Truths = np.logical_and(apart, leaving & wanted_marks == 0)
    return found


@lru_cache(maxsize=1024)
def _cut_further(
    held: tuple[MeshAxes, ...], wanted: tuple[MeshAxes, ...]
) -> tuple[_Truths, _Truths]:
    """Which of `wanted` cut each of `held` further, and of which `held` do; nothing may be written
    to either.
    """
    cut = np.array([[is_sharded_further(have, want) for want in wanted] for have in held])
    gathered = np.array([[is_sharded_further(want, have) for want in wanted] for have in held])
    return cut, gathered


@lru_cache(maxsize=1 << 16)
def _marks(axes: MeshAxes, divisors: tuple[int, ...]) -> int:
    """A bit for each divisor d of the group with stride ≤ d < stride · degree: axes that nest and
    meet share one.
    """
    return sum(
        1 << place
        for place, count in enumerate(divisors)
        if any(axis.stride <= count < axis.stride * axis.degree for axis in axes)
    )


@lru_cache(maxsize=1 << 16)
def _bounds(axes: MeshAxes, divisors: tuple[int, ...]) -> int:
    """A bit for each divisor of the group at which an axis begins or ends."""
    ends = {end for axis in axes for end in (axis.stride, axis.stride * axis.degree)}
    return sum(1 << divisors.index(end) for end in ends)


Addition = tuple[tuple[str, MeshAxes, int], ...]
"""The collectives that add up shares: kind, over which axes, and into how many parts the tensor is
cut before.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SumReduction:
    """Cost of several reductions, collectives one after the other. `steps` are the different
    collectives, the first of them none, with the parts into which the tensor is cut before; `of`
    says which of them each reduction has, [steps, reductions].
    """

    steps: list[tuple[Cost, int]]
    of: Integers

    def seconds(self, size_bytes: float) -> Floats:
        each = np.array([cost.seconds(size_bytes / parts) for cost, parts in self.steps])
        found: Floats = each[self.of].sum(axis=0)
        return found


_Paths = tuple[list[Layout], Integers, SumReduction, Integers]
"""Layouts that are held once shares are added up, what that costs; and which of each go from source
to target.
"""


def _scattered(
    pair: DimensionPair, shares: Sequence[MeshAxes], shares_of: Integers
) -> tuple[list[MeshAxes], Integers]:
    """The different axes along which shares are scattered along one dimension, the first of them
    none; and which of them are for each source and target, [sources · targets].
    """
    insides: dict[MeshAxes, int] = {(): 0}
    cases, case_of = distinct(pair.held_of * len(shares) + shares_of)
    table = np.zeros((len(cases), len(pair.wanted)), dtype=np.int64)
    for place, (now, over) in enumerate(divmod(case, len(shares)) for case in cases.tolist()):
        if shares[over]:
            found = (
                reduce_scatter_axes(pair.held[now][0], axes, shares[over])
                for axes, _ in pair.wanted
            )
            table[place] = [insides.setdefault(axes, len(insides)) for axes in found]
    return list(insides), table[case_of][:, pair.wanted_of].reshape(-1)


def _addition(shares: MeshAxes, parts: int, insides: Iterable[MeshAxes]) -> Addition:
    """Collectives that add up `shares` of a tensor in `parts` blocks, scattered along `insides` of
    a dimension each.
    """
    steps = []
    for inside in filter(None, insides):
        steps.append(("reduce_scatter", inside, parts))
        shares = without_axes(shares, inside)
        parts *= degree_of(inside)
    if shares:
        steps.append(("all_reduce", merge_axes(shares), parts))
    return tuple(steps)


@dataclass(frozen=True, slots=True, eq=False)
class ReshardTable:
    """Seconds of changes of layout on a group of `devices`; tables are made once for all tensors
    cut alike.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    _moves: dict[Hashable, tuple[Floats, Floats]] = field(default_factory=dict)
    _paths: dict[Hashable, _Paths] = field(default_factory=dict)
    _collectives: dict[tuple[str, MeshAxes], Cost] = field(default_factory=dict)

    def seconds(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float
    ) -> Floats:
        """Seconds from each of `sources`, which hold no shares of sums, to each of `targets`;
        [sources, targets]. The tensor has `size_bytes` in all. Each entry is the sum of
        `relayout_seconds` over `redistribution_steps`.
        """
        windows = tuple(layout.windows for layout in targets)
        shape = targets[0].shape if any(windows) else ()
        key = (
            tuple(layout.shard_axes for layout in sources),
            tuple(layout.shard_axes for layout in targets),
            windows,
            shape,
        )
        if key not in self._moves:
            self._moves[key] = self._affine(sources, targets)
        fixed, per_byte = self._moves[key]
        return fixed + per_byte * size_bytes

    def _affine(
        self, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> tuple[Floats, Floats]:
        """Seconds at once and a byte of the tensor, for each pair."""
        shape = len(sources), len(targets)
        pairs = _pairs_by_dimension(sources, targets)
        fixed = np.zeros(shape)
        per_byte = np.zeros(shape)
        apart = _gathers_apart(pairs, shape, len(self.devices))
        apart &= np.array([not layout.windows for layout in targets])
        for size, line in moving_lines(self.cluster, self.devices):
            by_size = [pair.by_neighbours(size) for pair in pairs]
            share, dimensions = _missing_volume(by_size, shape, len(self.devices) // size)
            fixed += np.where(apart, dimensions, share > 0) * line.fixed_s
            per_byte += share * line.per_byte_s
        return fixed, per_byte

    def to_reader(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float
    ) -> Floats:
        """From each of `sources`, shares of sums among them, to each of `targets`, which nobody but
        it wants. Shares are scattered where the target cuts further, as lowering does it. Of a
        tensor of `size_bytes`; [sources, targets].
        """
        if not any(source.is_partial for source in sources):
            return self.seconds(sources, targets, size_bytes)
        evens = [target.even() for target in targets]
        key = (
            tuple([(each.shard_axes, each.sums, each.means) for each in sources]),
            tuple([each.shard_axes for each in evens]),
        )
        if key not in self._paths:
            self._paths[key] = self._reduction_paths(sources, evens)
        held, held_of, adding, addition_of = self._paths[key]
        moving = self.seconds(held, targets, size_bytes)
        return adding.seconds(size_bytes)[addition_of] + np.take_along_axis(moving, held_of, axis=0)

    def _reduction_paths(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> _Paths:
        """How the shares of each of `sources` are added up on the way to `targets`, which are even
        and hold none. A target's axes cut one dimension each, so what is scattered along one does
        not depend on the others. Each layout that is held after that and each addition is made
        once.
        """
        rows = np.repeat(np.arange(len(sources)), len(targets))
        shares, shares_of = numbered(source.partial_over for source in sources)
        parts, parts_of = numbered(source.shard_count for source in sources)
        pairs = _pairs_by_dimension(sources, targets)
        cuts = []
        scattered = []
        for pair in pairs:
            insides, inside_of = _scattered(pair, shares, shares_of)
            ways, way_of = distinct(pair.held_of[rows] * len(insides) + inside_of)
            now_and_inside = (divmod(way, len(insides)) for way in ways.tolist())
            after, after_of = numbered(
                merge_axes(pair.held[now][0] + insides[number]) for now, number in now_and_inside
            )
            cuts.append((after, after_of[way_of]))
            scattered.append((insides, inside_of))
        cut_rows, held_of = combined(cuts, len(rows))
        held = []
        for row in cut_rows:
            own: list[MeshAxes] = [()] * len(targets[0].shape)
            for pair, axes in zip(pairs, row, strict=True):
                own[pair.dimension] = axes
            held.append(Layout(targets[0].shape, tuple(own)))
        added, addition_of = combined(
            [(shares, shares_of[rows]), (parts, parts_of[rows]), *scattered], len(rows)
        )
        adding = self._adding([_addition(over, count, insides) for over, count, *insides in added])
        shape = len(sources), len(targets)
        return held, held_of.reshape(shape), adding, addition_of.reshape(shape)

    def to_all(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float
    ) -> Floats:
        """The same where others want the value, too: shares are added up to copies first."""
        moving = self.seconds([each.reduced() for each in sources], targets, size_bytes)
        return self.to_copies(sources, size_bytes)[:, None] + moving

    def to_copies(self, sources: Sequence[Layout], size_bytes: float) -> Floats:
        """Cost of adding up the partial sums of each of `sources`, cut as they are."""
        additions: list[Addition] = [
            (("all_reduce", each.partial_over, each.shard_count),) if each.is_partial else ()
            for each in sources
        ]
        return self._adding(additions).seconds(size_bytes)

    def _adding(self, additions: Sequence[Addition]) -> SumReduction:
        """Cost of each of `additions`, for tensors of any size."""
        numbers = {
            step: number
            for number, step in enumerate(dict.fromkeys(itertools.chain(*additions)), 1)
        }
        of = np.zeros((max(map(len, additions)), len(additions)), dtype=np.int64)
        for column, each in enumerate(additions):
            of[: len(each), column] = [numbers[step] for step in each]
        steps = [(FREE, 1)]
        for kind, over, parts in numbers:
            if (kind, over) not in self._collectives:
                self._collectives[kind, over] = reduction_cost(
                    self.cluster, self.devices, kind, over
                )
            steps.append((self._collectives[kind, over], parts))
        return SumReduction(steps, of)


@dataclass(frozen=True, slots=True, eq=False)
class SharedValue:
    """A variable for a value that several nodes read: the layout in which they find it, and what
    layouts cost. So a change of layout that several readers share is paid once: a value goes from
    the layout in which its node leaves it to the variable's, and from there to each reader's.
    """

    layouts: tuple[Layout, ...]
    from_source: Floats
    """[configurations of the source, layouts] seconds; of a parameter there is no source: [0,
    layouts].
    """
    to_readers: tuple[Floats, ...]
    """For each reader [layouts, its configurations]; inf where they do not go together. Equal
    readers share them.
    """


def shared_value(
    source: TensorLayouts,
    readers: Sequence[TensorLayouts],
    size_bytes: float,
    table: ReshardTable,
    given: bool,
    times: int,
) -> SharedValue:
    """The variable of a computed value of `size_bytes` that changes layout `times` a step. `given`
    says whether others want it besides `readers`. Lowering scatters shares of sums only to what all
    readers want alike: hence a second set of the layouts wanted by all, which cost less to come to
    and cannot be left.
    """
    held = [layout.reduced() for layout in source.layouts]
    free = list(
        dict.fromkeys([*held, *(layout.even() for reader in readers for layout in reader.layouts)])
    )
    bound: list[Layout] = []
    if not given and any(layout.is_partial for layout in source.layouts):
        evens = [{layout.even() for layout in reader.layouts} for reader in readers]
        bound = [layout for layout in free if all(layout in even for even in evens)]
    into = [table.to_all(source.layouts, free, size_bytes)]
    if bound:
        into.append(table.to_reader(source.layouts, bound, size_bytes))
    out: dict[int, Floats] = {}
    for reader in readers:
        if id(reader) in out:
            continue
        moving = [table.seconds(free, reader.layouts, size_bytes)]
        if bound:
            of_equal = table.seconds(bound, reader.layouts, size_bytes)
            moving.append(
                of_equal + _only_equal(bound, [layout.even() for layout in reader.layouts])
            )
        out[id(reader)] = np.concatenate(moving)[:, reader.of] * times
    to_readers = tuple(out[id(reader)] for reader in readers)
    return SharedValue((*free, *bound), np.concatenate(into, axis=1)[source.of] * times, to_readers)


def shared_parameter(
    readers: Sequence[TensorLayouts], shape: tuple[int, ...], only_whole: bool
) -> SharedValue:
    """The variable of a parameter: held in the one layout that all its readers want, or whole and
    cut for free.
    """
    whole = replicated(shape)
    wanted = dict.fromkeys(layout for reader in readers for layout in reader.layouts)
    common = [
        each
        for each in wanted
        if each != whole and all(each in reader.layouts for reader in readers)
    ]
    if only_whole:
        common = []
    out = tuple(
        np.concatenate([np.zeros((1, len(reader.layouts))), _only_equal(common, reader.layouts)])[
            :, reader.of
        ]
        for reader in readers
    )
    return SharedValue((whole, *common), np.zeros((0, 1 + len(common))), out)


def _only_equal(layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Floats:
    rows = {layout: row for row, layout in enumerate(layouts)}
    found = np.full((len(layouts), len(wanted)), np.inf)
    for column, layout in enumerate(wanted):
        if layout in rows:
            found[rows[layout], column] = 0.0
    return found
