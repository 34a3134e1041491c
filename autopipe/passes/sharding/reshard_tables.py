"""Costs of all layout changes between two sets of layouts, as tables: t_x of PaSE (Elango, IPDPS
2021, section II).

The costs agree with the steps of `analysis/resharding`, but the costs of all pairs (source layout,
target layout) are computed at once.

The fraction of a tensor that a device lacks depends on the mesh axes of both layouts and not on the
tensor's sizes, unless an operator reads the tensor through windows (convolution, pooling). So a
change costs fixed seconds plus seconds per byte, and tensors that are sharded equally share one
table. Few distinct shardings of each dimension occur. They are numbered, and properties of a pair
of shardings are computed once per pair of numbers.
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
    combined_coordinate,
    merge_axes,
    replicated_layout,
    sharded_over_neighbours,
    total_degree,
)
from autopipe.passes.analysis.resharding import (
    are_nested,
    is_sharded_further,
    reduce_scatter_axes,
    remove_axes,
)
from autopipe.passes.cost.communication import (
    FREE,
    CollectiveCost,
    reduction_cost,
    transfer_times_by_level,
)
from autopipe.passes.sharding.configurations import (
    Integers,
    TensorLayouts,
    index_distinct,
    index_distinct_codes,
    index_distinct_rows,
)

Floats = NDArray[np.float64]
_Truths = NDArray[np.bool_]

DimensionSharding = tuple[MeshAxes, WindowedShards | None]
"""(mesh axes that shard a dimension, its shards if they are read through windows; None for even
shards).
"""


@dataclass(frozen=True, slots=True, eq=False)
class DimensionPair:
    """One dimension, of `extent` elements, in several source layouts and several target layouts.

    held, wanted: its distinct shardings in the source layouts, and in the target layouts.
    held_of: for each source layout, the index in `held` of its sharding.
    wanted_of: for each target layout, the index in `wanted` of its sharding.
    """

    dimension: int
    extent: int
    held: tuple[DimensionSharding, ...]
    held_of: Integers
    wanted: tuple[DimensionSharding, ...]
    wanted_of: Integers

    def over_neighbour_groups(self, size: int) -> DimensionPair:
        """Return the pair with the shardings of this dimension over groups of `size` neighbouring
        devices, each group counted as one device (`ir.layout.layout_over_neighbours`).
        """
        held, wanted = (
            tuple(sharded_over_neighbours(*sharding, size) for sharding in shardings)
            for shardings in (self.held, self.wanted)
        )
        return replace(self, held=held, wanted=wanted)

    def expand_to_layouts(self, table: NDArray[Any]) -> NDArray[Any]:
        """Return a table with one entry per source and target layout, looked up in `table`, which
        has one entry per sharding of `held` and of `wanted`.
        """
        found: NDArray[Any] = table[self.held_of][:, self.wanted_of]
        return found


def _pairs_by_dimension(
    sources: Sequence[Layout], targets: Sequence[Layout]
) -> list[DimensionPair]:
    """Return a `DimensionPair` for each dimension that at least one of `sources` or `targets`
    shards.
    """
    found = []
    for dimension, size in enumerate(targets[0].shape):
        (held, held_of), (wanted, wanted_of) = (
            index_distinct(
                (each.shard_axes[dimension], each.windows[dimension] if each.windows else None)
                for each in layouts
            )
            for layouts in (sources, targets)
        )
        if any(axes for axes, _ in (*held, *wanted)):
            found.append(
                DimensionPair(dimension, size, tuple(held), held_of, tuple(wanted), wanted_of)
            )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Overlap:
    """How much of one dimension each device has of what it needs, for each pair of a present (held)
    and a needed (wanted) sharding. A position is the position of a device in its group.

    The dimension is divided into `extent` cells of equal size. The last three fields have shape
    [held shardings, wanted shardings].
    """

    extent: int
    need: Floats
    """Number of cells (equal parts of the dimension) that the device at each position needs, of
    shape [wanted shardings, positions].
    """
    common: Floats
    """Number of cells (equal parts of the dimension) that the device at each position both needs
    and has, of shape [held shardings, wanted shardings, positions].
    """
    minimum: Floats
    """Minimum of `common` over the positions."""
    lacks: _Truths
    """True if some device lacks a part of the dimension that it needs."""
    regular: _Truths
    """True if two conditions hold. All devices need parts of equal size. All devices that have
    something of the part that they need have equally much of it.
    """


@lru_cache(maxsize=1024)
def _overlap_between(
    held: tuple[DimensionSharding, ...],
    wanted: tuple[DimensionSharding, ...],
    extent: int,
    group: int,
) -> _Overlap:
    """Return the overlap of each pair of shardings of one dimension, for `group` devices. Callers
    must not change its arrays, because the result is cached.

    If a sharding of `wanted` has windows, `extent` is the size of the dimension and a cell is one
    element. Otherwise `extent` is 0, and the number of cells is the least common multiple of the
    degrees of all shardings.
    """
    cells = extent or math.lcm(*(total_degree(axes) for axes, _ in (*held, *wanted)))
    positions = np.arange(group)

    def ranges(shardings: tuple[DimensionSharding, ...]) -> tuple[Floats, Floats]:
        """Return (starts, ends), both of shape [shardings, positions]: the first cell of the shard
        at each position, and the cell after its last cell. Both are clipped to the dimension, which
        is divided into equal cells.
        """
        starts = np.zeros((len(shardings), group))
        stops = np.zeros((len(shardings), group))
        for number, (axes, window) in enumerate(shardings):
            even = cells // total_degree(axes)
            shards = window or WindowedShards(even, 0, even)
            starts[number] = combined_coordinate(axes, positions) * shards.step + shards.offset
            stops[number] = starts[number] + shards.length
        return np.maximum(starts, 0), np.minimum(stops, cells)

    have_from, have_to = ranges(held)
    need_from, need_to = ranges(wanted)
    need = np.maximum(need_to - need_from, 0.0)
    ends = np.minimum(have_to[:, None], need_to[None])
    common = np.maximum(ends - np.maximum(have_from[:, None], need_from[None]), 0.0)
    maximum = common.max(axis=2, keepdims=True)
    regular = np.all((common == 0) | (common == maximum), axis=2) & np.all(
        need == need[:, :1], axis=1
    )
    return _Overlap(cells, need, common, common.min(axis=2), np.any(need > common, axis=2), regular)


_CHUNK = 2048
"""Maximum number of pairs of layouts that are compared in one step, so that the arrays with one
entry per pair and device stay in the CPU cache.
"""


def _missing_volume(
    pairs: Sequence[DimensionPair], shape: tuple[int, int], group: int
) -> tuple[Floats, Integers]:
    """Return (fraction, dimensions), both of shape [sources, targets], for a change between layouts
    on `group` devices.

    fraction: for source layout u and target layout v, t_x(u, v) of PaSE divided by the number of
    elements of the tensor:

        fraction = max over devices d of (|A(v, d)| - |A(v, d) ∩ A(u, d)|) / elements

    A(u, d) is the slice that device d holds under layout u.
    dimensions: the number of dimensions along which some device lacks data.

    `pairs` are the sharded dimensions, and `shape` is (number of sources, number of targets). In
    most cases the shards of each dimension are either nested or disjoint (`_Overlap.regular`). Then
    the minimum intersection is the product of the dimensions' minima. For all other pairs of
    layouts, the intersection is computed for each device.
    """
    minimum = np.ones(shape)
    regular = np.ones(shape, dtype=bool)
    need = np.ones(shape[1])
    dimensions = np.zeros(shape, dtype=np.int64)
    overlaps = []
    for pair in pairs:
        windows = any(window for _, window in pair.wanted)
        overlap = _overlap_between(pair.held, pair.wanted, pair.extent if windows else 0, group)
        overlaps.append(overlap)
        minimum *= pair.expand_to_layouts(overlap.minimum)
        if not overlap.regular.all():
            regular &= pair.expand_to_layouts(overlap.regular)
        need *= overlap.need.max(axis=1)[pair.wanted_of]
        dimensions += pair.expand_to_layouts(overlap.lacks)
    cells = math.prod(overlap.extent for overlap in overlaps)
    fraction = (need - minimum) / cells
    rows, columns = np.nonzero(~regular)
    needed_cells = np.ones((shape[1], group))
    for pair, overlap in zip(pairs, overlaps, strict=True):
        needed_cells *= overlap.need[pair.wanted_of]
    for start in range(0, len(rows), _CHUNK):
        row = rows[start : start + _CHUNK]
        column = columns[start : start + _CHUNK]
        common_cells = np.ones((len(row), group))
        for pair, overlap in zip(pairs, overlaps, strict=True):
            common_cells *= overlap.common[pair.held_of[row], pair.wanted_of[column]]
        fraction[row, column] = (needed_cells[column] - common_cells).max(axis=1) / cells
    return fraction, dimensions


def _is_slice_then_gather(
    pairs: Sequence[DimensionPair], shape: tuple[int, int], group: int
) -> _Truths:
    """Return a table of shape [sources, targets]: True if the layout change consists of slices and
    then all-gathers of single dimensions.

    These are the changes of rule 4 of `redistribution_steps`: each dimension is sharded further or
    gathered; each bound (stride, or stride · degree) of a mesh axis divides all larger bounds; and
    no gathered mesh axis shards another dimension of the target. `pairs` are the sharded
    dimensions, and `group` is the number of devices.
    """
    divisors = tuple(count for count in range(1, group + 1) if group % count == 0)
    is_separable = np.ones(shape, dtype=bool)
    bound_bits = np.zeros(shape, dtype=np.int64)
    gathered_bits = np.zeros(shape, dtype=np.int64)
    target_bits = np.zeros(shape[1], dtype=np.int64)
    for pair in pairs:
        held, wanted = (
            tuple(axes for axes, _ in shardings) for shardings in (pair.held, pair.wanted)
        )
        sharded_further, gathered = _sharded_further(held, wanted)
        held_bits, wanted_bits = (
            np.array([_axis_bits(axes, divisors) for axes in shardings])
            for shardings in (held, wanted)
        )
        held_bounds, wanted_bounds = (
            np.array([_bound_bits(axes, divisors) for axes in shardings])
            for shardings in (held, wanted)
        )
        bound_bits |= pair.expand_to_layouts(held_bounds[:, None] | wanted_bounds[None])
        is_separable &= pair.expand_to_layouts(sharded_further | gathered)
        gathered_bits |= pair.expand_to_layouts(
            np.where(gathered, held_bits[:, None] & ~wanted_bits[None], 0)
        )
        target_bits |= wanted_bits[pair.wanted_of]
    distinct_bounds, index = np.unique(bound_bits, return_inverse=True)
    nests = [
        are_nested([count for bit, count in enumerate(divisors) if bits >> bit & 1])
        for bits in distinct_bounds.tolist()
    ]
    is_separable &= np.array(nests, dtype=bool)[index.reshape(bound_bits.shape)]
    found: _Truths = np.logical_and(is_separable, gathered_bits & target_bits == 0)
    return found


@lru_cache(maxsize=1024)
def _sharded_further(
    held: tuple[MeshAxes, ...], wanted: tuple[MeshAxes, ...]
) -> tuple[_Truths, _Truths]:
    """Return (sharded, gathered), tables of shape [held, wanted] for the mesh axes of one
    dimension.

    sharded: True if `wanted` shards the dimension as `held` does and divides the shards further, or
    if both are equal.
    gathered: True if `held` shards the dimension as `wanted` does and divides the shards further,
    or if both are equal.

    Callers must not change the arrays, because the result is cached.
    """
    sharded = np.array(
        [[is_sharded_further(present, target) for target in wanted] for present in held]
    )
    gathered = np.array(
        [[is_sharded_further(target, present) for target in wanted] for present in held]
    )
    return sharded, gathered


@lru_cache(maxsize=1 << 16)
def _axis_bits(axes: MeshAxes, divisors: tuple[int, ...]) -> int:
    """Return an integer as a set of bits, one per entry of `divisors`. A bit is set if for one of
    `axes` stride <= divisor < stride · degree.

    `divisors` are the divisors of the number of devices. The bounds of an axis are its stride and
    stride · degree. If each bound of two axes divides the larger ones, the axes overlap if and only
    if they have a common bit.
    """
    return sum(
        1 << bit
        for bit, divisor in enumerate(divisors)
        if any(axis.stride <= divisor < axis.stride * axis.degree for axis in axes)
    )


@lru_cache(maxsize=1 << 16)
def _bound_bits(axes: MeshAxes, divisors: tuple[int, ...]) -> int:
    """Return an integer as a set of bits, one per entry of `divisors`. A bit is set if the divisor
    is the stride, or stride · degree, of one of `axes`.
    """
    bounds = {bound for axis in axes for bound in (axis.stride, axis.stride * axis.degree)}
    return sum(1 << divisors.index(bound) for bound in bounds)


Addition = tuple[tuple[str, MeshAxes, int], ...]
"""The collectives that reduce the partial sums of a tensor, in order. Each is a triple (kind, mesh
axes, number of shards of the tensor before the collective).
"""


@dataclass(frozen=True, slots=True, eq=False)
class SumReduction:
    """Costs of several reductions of partial sums, each of which is a sequence of collectives.

    steps: pairs (cost of a collective, number of shards of the tensor before it) of all distinct
    collectives. The first entry costs nothing.
    of: indices into `steps`; column r contains the collectives of reduction r, filled up with 0.
    """

    steps: list[tuple[CollectiveCost, int]]
    of: Integers

    def seconds(self, size_bytes: float) -> Floats:
        """Return the seconds of each reduction for a tensor of `size_bytes` bytes (unsharded)."""
        each = np.array([cost.seconds(size_bytes / parts) for cost, parts in self.steps])
        found: Floats = each[self.of].sum(axis=0)
        return found


_Paths = tuple[list[Layout], Integers, SumReduction, Integers]
"""(layouts, layout indices, reductions, reduction indices): the distinct layouts after the
reduction of partial sums, the costs of the distinct reductions, and for each pair of source and
target the index of its layout and of its reduction, both of shape [sources, targets].
"""


def _scatter_axes(
    pair: DimensionPair, partial_axes: Sequence[MeshAxes], partial_of: Integers
) -> tuple[list[MeshAxes], Integers]:
    """Return (axes, index): the distinct mesh axes over which one dimension is reduce-scattered,
    and for each pair of source and target layout the index of its mesh axes.

    The first entry of `axes` is (), no reduce-scatter. `index` has one entry per pair, in row-major
    order of [sources, targets]. `partial_axes` are the distinct mesh axes over which sources are
    partial sums, and `partial_of` is the index of each source's.
    """
    index_of_axes: dict[MeshAxes, int] = {(): 0}
    cases, case_of = index_distinct_codes(pair.held_of * len(partial_axes) + partial_of)
    table = np.zeros((len(cases), len(pair.wanted)), dtype=np.int64)
    for row, (held, partial) in enumerate(
        divmod(case, len(partial_axes)) for case in cases.tolist()
    ):
        if partial_axes[partial]:
            found = (
                reduce_scatter_axes(pair.held[held][0], axes, partial_axes[partial])
                for axes, _ in pair.wanted
            )
            table[row] = [index_of_axes.setdefault(axes, len(index_of_axes)) for axes in found]
    return list(index_of_axes), table[case_of][:, pair.wanted_of].reshape(-1)


def _reduction_steps(
    partial_axes: MeshAxes, shards: int, axes_by_dimension: Iterable[MeshAxes]
) -> Addition:
    """Return the collectives that reduce the partial sums of a tensor over the mesh axes
    `partial_axes`.

    `shards` is the number of shards of the tensor before. `axes_by_dimension` contains, for each
    dimension, the mesh axes over which it is reduce-scattered. The sums over the remaining mesh
    axes are all-reduced.
    """
    steps = []
    for scatter_axes in filter(None, axes_by_dimension):
        steps.append(("reduce_scatter", scatter_axes, shards))
        partial_axes = remove_axes(partial_axes, scatter_axes)
        shards *= total_degree(scatter_axes)
    if partial_axes:
        steps.append(("all_reduce", merge_axes(partial_axes), shards))
    return tuple(steps)


@dataclass(frozen=True, slots=True, eq=False)
class ReshardTable:
    """Seconds of layout changes on the group `devices`. Tensors that are sharded equally share
    cached tables.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    _moves: dict[Hashable, tuple[Floats, Floats]] = field(default_factory=dict)
    _paths: dict[Hashable, _Paths] = field(default_factory=dict)
    _collectives: dict[tuple[str, MeshAxes], CollectiveCost] = field(default_factory=dict)

    def seconds(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float
    ) -> Floats:
        """Return the seconds to change a tensor from each of the layouts `sources`, without partial
        sums, to each of the layouts `targets`, of shape [sources, targets].

        The unsharded tensor has `size_bytes` bytes. An entry agrees with the sum of
        `redistribution_seconds` over the steps of `redistribution_steps`.
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
            self._moves[key] = self._fixed_and_per_byte(sources, targets)
        fixed, per_byte = self._moves[key]
        return fixed + per_byte * size_bytes

    def _fixed_and_per_byte(
        self, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> tuple[Floats, Floats]:
        """Return (fixed seconds, seconds per byte of the unsharded tensor) to change a tensor from
        each of `sources` to each of `targets`, both of shape [sources, targets].
        """
        shape = len(sources), len(targets)
        pairs = _pairs_by_dimension(sources, targets)
        fixed = np.zeros(shape)
        per_byte = np.zeros(shape)
        is_separable = _is_slice_then_gather(pairs, shape, len(self.devices))
        is_separable &= np.array([not layout.windows for layout in targets])
        for size, line in transfer_times_by_level(self.cluster, self.devices):
            by_size = [pair.over_neighbour_groups(size) for pair in pairs]
            fraction, dimensions = _missing_volume(by_size, shape, len(self.devices) // size)
            fixed += np.where(is_separable, dimensions, fraction > 0) * line.fixed_s
            per_byte += fraction * line.per_byte_s
        return fixed, per_byte

    def to_reader(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float
    ) -> Floats:
        """Return the seconds to change a tensor with a single reader from each of the layouts
        `sources` to each of the reader's layouts `targets`, of shape [sources, targets].

        `sources` may have partial sums. As in lowering, the sums are reduce-scattered along a
        dimension that the target shards further, and otherwise all-reduced. The unsharded tensor
        has `size_bytes` bytes.
        """
        if not any(source.is_partial for source in sources):
            return self.seconds(sources, targets, size_bytes)
        evens = [target.with_even_shards() for target in targets]
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
        """Return how the partial sums of each of `sources` are reduced if the tensor then changes
        to each of `targets`.

        `targets` have even shards and no partial sums. A mesh axis shards at most one dimension of
        a target, so the reduce-scatter of one dimension does not depend on the other dimensions.
        Equal layouts after the reduction, and equal reductions, are created once.
        """
        rows = np.repeat(np.arange(len(sources)), len(targets))
        partial_axes, partial_of = index_distinct(source.partial_over for source in sources)
        shards, shards_of = index_distinct(source.shard_count for source in sources)
        pairs = _pairs_by_dimension(sources, targets)
        cuts = []
        scattered = []
        for pair in pairs:
            axes_list, inside_of = _scatter_axes(pair, partial_axes, partial_of)
            distinct_ways, way_of = index_distinct_codes(
                pair.held_of[rows] * len(axes_list) + inside_of
            )
            now_and_inside = (divmod(way, len(axes_list)) for way in distinct_ways.tolist())
            after, after_of = index_distinct(
                merge_axes(pair.held[now][0] + axes_list[number]) for now, number in now_and_inside
            )
            cuts.append((after, after_of[way_of]))
            scattered.append((axes_list, inside_of))
        cut_rows, held_of = index_distinct_rows(cuts, len(rows))
        held = []
        for row in cut_rows:
            shard_axes: list[MeshAxes] = [()] * len(targets[0].shape)
            for pair, axes in zip(pairs, row, strict=True):
                shard_axes[pair.dimension] = axes
            held.append(Layout(targets[0].shape, tuple(shard_axes)))
        added, addition_of = index_distinct_rows(
            [(partial_axes, partial_of[rows]), (shards, shards_of[rows]), *scattered], len(rows)
        )
        adding = self._reduction_costs(
            [_reduction_steps(over, count, axes_list) for over, count, *axes_list in added]
        )
        shape = len(sources), len(targets)
        return held, held_of.reshape(shape), adding, addition_of.reshape(shape)

    def to_all(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float
    ) -> Floats:
        """Return the seconds to change a value with several readers from each of the layouts
        `sources` to each of the layouts `targets` of one reader, of shape [sources, targets].

        `sources` may have partial sums, which are all-reduced first. The unsharded value has
        `size_bytes` bytes.
        """
        moving = self.seconds([each.after_all_reduce() for each in sources], targets, size_bytes)
        return self.to_copies(sources, size_bytes)[:, None] + moving

    def to_copies(self, sources: Sequence[Layout], size_bytes: float) -> Floats:
        """Return, for each of the layouts `sources`, the seconds to all-reduce its partial sums
        without a change of its shards. The unsharded tensor has `size_bytes` bytes.
        """
        additions: list[Addition] = [
            _reduction_steps(each.partial_over, each.shard_count, ()) for each in sources
        ]
        return self._reduction_costs(additions).seconds(size_bytes)

    def _reduction_costs(self, additions: Sequence[Addition]) -> SumReduction:
        """Return the costs of the reductions `additions`, as functions of the bytes of a tensor."""
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
    """A variable of the optimisation model for a value that several nodes read. Its choices are
    `layouts`.

    The value changes from the layout in which its node produces it to the chosen layout, and from
    there to the layout of each reader. So a change of layout that several readers have in common
    counts once.
    """

    layouts: tuple[Layout, ...]
    from_source: Floats
    """Seconds per step, of shape [configurations of the node that computes the value, layouts]. For
    a parameter, which no node computes, the shape is [0, layouts].
    """
    to_readers: tuple[Floats, ...]
    """For each reader: seconds per step, of shape [layouts, configurations of the reader]; infinity
    for pairs that are not allowed. Equal readers share one array.
    """


def shared_value(
    source: TensorLayouts,
    readers: Sequence[TensorLayouts],
    size_bytes: float,
    table: ReshardTable,
    given: bool,
    times: int,
) -> SharedValue:
    """Return the variable of a value that a node computes and several nodes read.

    source, readers: the layouts in which the node produces the value and its readers need it.
    size_bytes: bytes of the unsharded value.
    given: True if the stage outputs the value.
    times: number of times per step that a change of its layout runs.

    Lowering reduce-scatters partial sums only if all readers need one layout and the stage does not
    output the value, and otherwise all-reduces them. So if the value can be a partial sum, each
    layout that all readers can need occurs twice among the choices. The second choice (`bound`) is
    reached by a cheaper reduce-scatter, and allows only readers in configurations that need this
    layout.
    """
    held = [layout.after_all_reduce() for layout in source.layouts]
    free = list(
        dict.fromkeys(
            [*held, *(layout.with_even_shards() for reader in readers for layout in reader.layouts)]
        )
    )
    bound: list[Layout] = []
    if not given and any(layout.is_partial for layout in source.layouts):
        evens = [{layout.with_even_shards() for layout in reader.layouts} for reader in readers]
        bound = [layout for layout in free if all(layout in even for even in evens)]
    from_source = [table.to_all(source.layouts, free, size_bytes)]
    if bound:
        from_source.append(table.to_reader(source.layouts, bound, size_bytes))
    to_reader: dict[int, Floats] = {}
    for reader in readers:
        if id(reader) in to_reader:
            continue
        moving = [table.seconds(free, reader.layouts, size_bytes)]
        if bound:
            seconds_to_equal = table.seconds(bound, reader.layouts, size_bytes)
            moving.append(
                seconds_to_equal
                + _zero_if_equal(bound, [layout.with_even_shards() for layout in reader.layouts])
            )
        to_reader[id(reader)] = np.concatenate(moving)[:, reader.layout_of] * times
    to_readers = tuple(to_reader[id(reader)] for reader in readers)
    return SharedValue(
        (*free, *bound), np.concatenate(from_source, axis=1)[source.layout_of] * times, to_readers
    )


def shared_parameter(
    readers: Sequence[TensorLayouts], shape: tuple[int, ...], only_whole: bool
) -> SharedValue:
    """Return the variable of a parameter of shape `shape` that several nodes read.

    Its choices are the replicated layout, from which each reader slices at no cost, and each layout
    that all readers can need. With `only_whole`, the replicated layout is the only choice.
    """
    full = replicated_layout(shape)
    wanted = dict.fromkeys(layout for reader in readers for layout in reader.layouts)
    common = [
        each
        for each in wanted
        if each != full and all(each in reader.layouts for reader in readers)
    ]
    if only_whole:
        common = []
    to_readers = tuple(
        np.concatenate(
            [np.zeros((1, len(reader.layouts))), _zero_if_equal(common, reader.layouts)]
        )[:, reader.layout_of]
        for reader in readers
    )
    return SharedValue((full, *common), np.zeros((0, 1 + len(common))), to_readers)


def _zero_if_equal(layouts: Sequence[Layout], wanted: Sequence[Layout]) -> Floats:
    """Return a table of shape [layouts, wanted] with 0 for pairs of equal layouts and infinity for
    all other pairs.
    """
    rows = {layout: row for row, layout in enumerate(layouts)}
    found = np.full((len(layouts), len(wanted)), np.inf)
    for column, layout in enumerate(wanted):
        if layout in rows:
            found[rows[layout], column] = 0.0
    return found
