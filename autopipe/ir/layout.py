"""Layouts of tensors on a group of devices, and the data that a change of layout moves.

`Layout` contains the information that DTensor calls placements: which mesh axes shard which
dimension, and over which mesh axes the devices have partial sums.

The volume of a change of layout is t_x of PaSE (Elango, IPDPS 2021, section II): the elements that
a device needs and does not have. At an outer level of the cluster, nodes take the role of
devices: each node receives each missing element once. The cost model and code generation both use
this module, so the predicted communication is the communication that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add, sub
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.codec import Index
from autopipe.ir.placement import Split
from autopipe.ir.space import AxisKind, Dimension, Space, Windowed
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice of a tensor: for each dimension a half-open index range [start, stop)."""

    starts: tuple[Index, ...]
    stops: tuple[Index, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.starts, self.stops))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Return the intersection with `other`, or None if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return TensorSlice(starts, stops)

    def shifted(self, distances: Iterable[int]) -> TensorSlice:
        """Return this slice moved by `distances`, one signed number of elements per dimension."""
        steps = tuple(distances)
        return TensorSlice(tuple(map(add, self.starts, steps)), tuple(map(add, self.stops, steps)))

    def within(self, outer: TensorSlice) -> TensorSlice:
        """Return this slice in coordinates whose origin is the first element of `outer`."""
        return self.shifted(-start for start in outer.starts)

    def moved(self, source: TensorSlice, target: TensorSlice) -> TensorSlice:
        """Return this slice moved by the vector from the first element of `source` to the first
        element of `target`.
        """
        return self.shifted(map(sub, target.starts, source.starts))


def full_slice(shape: tuple[int, ...]) -> TensorSlice:
    """Return the slice that covers an entire tensor of this shape."""
    return TensorSlice((0,) * len(shape), shape)


class MeshAxis(NamedTuple):
    """An axis of the device mesh that a group forms.

    The device at position p of the group has coordinate (p // stride) % degree along this axis.
    """

    degree: int
    stride: int

    def coordinate(self, position: int) -> int:
        return position // self.stride % self.degree


MeshAxes = tuple[MeshAxis, ...]
"""Mesh axes, ordered from outer to inner."""


def mesh_axes_of(splits: Sequence[Split], group: int) -> MeshAxes:
    """Return one mesh axis per split, for a group of `group` devices.

    The first split gets the outermost axis (the largest stride). If the product of the degrees is
    smaller than `group`, the innermost positions hold copies. The product must divide `group`.
    """
    found = []
    stride = group
    for split in splits:
        assert stride % split.degree == 0, (
            f"{' '.join(map(str, splits))} over {group} {plural(group, 'device')}"
        )
        stride //= split.degree
        found.append(MeshAxis(split.degree, stride))
    return tuple(found)


def mesh_axis_by_name(splits: Sequence[Split], group: int) -> dict[str, MeshAxis]:
    """Return the mesh axis of each split, by the name of the split axis of the iteration space,
    outer to inner.
    """
    return {
        split.axis: axis for split, axis in zip(splits, mesh_axes_of(splits, group), strict=True)
    }


def merge_axes(axes: Iterable[MeshAxis]) -> MeshAxes:
    """Return the canonical form of `axes`, which are ordered from outer to inner.

    Two neighbouring axes become one if the outer stride is inner stride · inner degree. Axes of
    degree 1 are dropped.
    """
    found: list[MeshAxis] = []
    for axis in axes:
        if axis.degree == 1:
            continue
        if found and found[-1].stride == axis.stride * axis.degree:
            axis = MeshAxis(found.pop().degree * axis.degree, axis.stride)
        found.append(axis)
    return tuple(found)


Positions = TypeVar("Positions", int, NDArray[np.int64])
"""The position of one device in its group, or an array of positions."""


def coordinate_along(axes: MeshAxes, position: Positions) -> Positions:
    """Return the coordinate of each position along `axes`, combined into one number.

    `axes` are ordered from outer to inner; the innermost one varies fastest.
    """
    index = position - position
    for axis in axes:
        index = index * axis.degree + position // axis.stride % axis.degree
    return index


def total_degree(axes: Iterable[MeshAxis]) -> int:
    """Return the product of the degrees of `axes`."""
    return math.prod([axis.degree for axis in axes])


def group_members(axes: MeshAxes, position: int) -> tuple[int, ...]:
    """Return the positions of the devices that form a process group over `axes` with the device at
    `position`.

    Their coordinates differ from those of `position` along `axes` only. The order is row-major over
    `axes`.
    """
    found = [position - sum(axis.coordinate(position) * axis.stride for axis in axes)]
    for axis in axes:
        found = [each + place * axis.stride for each in found for place in range(axis.degree)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WindowedShards:
    """Shards of one dimension that an operator reads through windows (convolution, pooling).

    Shard i consists of the `length` elements from index i · step + offset on. Neighbouring shards
    may overlap or leave gaps, and the first and last ones may extend beyond the tensor.
    """

    step: int
    offset: int
    length: int

    def joined(self, count: int) -> WindowedShards:
        """Return the shards that result if each `count` consecutive shards are joined into one."""
        return WindowedShards(self.step * count, self.offset, (count - 1) * self.step + self.length)


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of one tensor over the devices of a group (what DTensor calls its placements).

    `shard_axes[i]` are the mesh axes that shard dimension i, outer to inner. Over `sums` the
    devices hold partial sums (the tensor is their sum); over `means` they hold partial means (the
    tensor is their average). Over all other mesh axes they hold copies. All axes are merged
    (`merge_axes`), so that equal distributions compare equal.

    Shards along a dimension have equal sizes and do not overlap, except for an operand that is read
    through windows. `windows` is () if no dimension is; otherwise `windows[i]` gives the shards of
    dimension i, or is None if they are even. `fill` is the value of elements beyond the tensor.
    Results of nodes always have even shards.
    """

    shape: tuple[int, ...]
    shard_axes: tuple[MeshAxes, ...]
    sums: MeshAxes = ()
    means: MeshAxes = ()
    windows: tuple[WindowedShards | None, ...] = ()
    fill: float = 0.0
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # The number of different layouts is small, but each operand of each node looks one up.
        if (known_hash := self._hash) is None:
            known_hash = hash(
                (self.shape, self.shard_axes, self.sums, self.means, self.windows, self.fill)
            )
            object.__setattr__(self, "_hash", known_hash)
        return known_hash

    @property
    def is_partial(self) -> bool:
        """True if the devices hold partial sums or partial means."""
        return bool(self.sums or self.means)

    @property
    def partial_over(self) -> MeshAxes:
        """Return the mesh axes over which devices hold partial sums or means, outer to inner.

        An axis of sums and an axis of means are not merged, because a reduction over a part of both
        must leave one of each.
        """
        return tuple(sorted(self.sums + self.means, key=lambda axis: -axis.stride))

    @property
    def shard_count(self) -> int:
        """Return the number of different shards, which is the product of the degrees of
        `shard_axes`.
        """
        return total_degree(axis for axes in self.shard_axes for axis in axes)

    def reduced(self) -> Layout:
        """Return the layout after the partial sums and means are all-reduced; the shards stay."""
        return Layout(self.shape, self.shard_axes)

    def even(self) -> Layout:
        """Return the layout with even shards along the same mesh axes.

        A dimension that is read through windows becomes unsharded if the degree does not divide its
        size.
        """
        if not self.windows:
            return self
        dimensions = zip(self.shape, self.shard_axes, self.windows, strict=True)
        shard_axes = (
            () if window and size % total_degree(axes) else axes
            for size, axes, window in dimensions
        )
        return Layout(self.shape, tuple(shard_axes))

    def shard_ranges(self) -> tuple[WindowedShards, ...]:
        """Return the index ranges of the shards of each dimension; even shards have offset 0 and
        step = length.
        """
        even = [
            size // total_degree(axes)
            for size, axes in zip(self.shape, self.shard_axes, strict=True)
        ]
        windows = self.windows or (None,) * len(even)
        return tuple(
            window or WindowedShards(size, 0, size)
            for window, size in zip(windows, even, strict=True)
        )

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of one device's shard."""
        if not self.windows:
            return tuple(
                size // total_degree(axes)
                for size, axes in zip(self.shape, self.shard_axes, strict=True)
            )
        return tuple(shards.length for shards in self.shard_ranges())

    @property
    def local_elements(self) -> int:
        """Return the number of elements of one device's shard."""
        return (
            math.prod(self.local_shape())
            if self.windows
            else math.prod(self.shape) // self.shard_count
        )

    def copies_of_first_shard(self, group: int) -> tuple[int, ...]:
        """Return the positions, among `group` devices, that hold the shard of position 0.

        For a partial layout, these devices hold partial sums of equal shards.
        """
        positions = np.arange(group)
        difference = sum(
            (coordinate_along(axes, positions) for axes in self.shard_axes),
            np.zeros_like(positions),
        )
        return tuple(np.flatnonzero(difference == 0).tolist())

    def shard(self, position: int) -> TensorSlice:
        """Return the slice of the tensor that the device at `position` holds.

        A shard that is read through windows may extend beyond the tensor.
        """
        starts = []
        stops = []
        for shards, axes in zip(self.shard_ranges(), self.shard_axes, strict=True):
            starts.append(coordinate_along(axes, position) * shards.step + shards.offset)
            stops.append(starts[-1] + shards.length)
        return TensorSlice(tuple(starts), tuple(stops))


@lru_cache(maxsize=1024)
def holders_by_shard(layout: Layout, group: int) -> tuple[tuple[TensorSlice, tuple[int, ...]], ...]:
    """Return (shard, positions) pairs: each different shard, with all positions of `group` that
    hold it.

    Shards are ordered by the first position that holds them.
    """
    found: dict[TensorSlice, list[int]] = {}
    for position in range(group):
        found.setdefault(layout.shard(position), []).append(position)
    return tuple((shard, tuple(positions)) for shard, positions in found.items())


def replicated_layout(shape: tuple[int, ...]) -> Layout:
    """Return the layout in which each device holds the full tensor."""
    return Layout(shape, ((),) * len(shape))


def shard_copies(layout: Layout, group: int) -> Layout:
    """Return the layout in which each group of copies is sharded further, so that no two devices
    hold equal data.

    The first dimension whose local size is divisible by the number of copies is sharded. Return
    `layout` unchanged if there are no copies, if no dimension is divisible, if the layout has
    windows or partial sums, or if the mesh axes do not nest.
    """
    copies: list[MeshAxis] = []
    outer = group
    for axis in sorted(
        (axis for axes in layout.shard_axes for axis in axes), key=lambda axis: -axis.stride
    ):
        span = axis.stride * axis.degree
        if outer % span:
            return layout
        copies.append(MeshAxis(outer // span, span))
        outer = axis.stride
    copy_axes = merge_axes([*copies, MeshAxis(outer, 1)])
    if not copy_axes or layout.windows or layout.is_partial:
        return layout
    for dimension, size in enumerate(layout.local_shape()):
        if size % total_degree(copy_axes) == 0:
            shard_axes = list(layout.shard_axes)
            shard_axes[dimension] = merge_axes([*shard_axes[dimension], *copy_axes])
            return Layout(layout.shape, tuple(shard_axes))
    return layout


def operand_layout(
    dimensions: tuple[Dimension, ...],
    shape: tuple[int, ...],
    axes: Mapping[str, MeshAxis],
    windows: Sequence[Windowed] = (),
) -> Layout:
    """Return the layout in which devices need an operand, or hold a result, of a node.

    `dimensions` are the dimensions of the operand in the node's iteration space and `shape` is its
    shape. `axes` is `mesh_axis_by_name` of the node's splits. `windows` are the operand's
    (`Space.windows_of`). The splits must satisfy `are_even_splits`: otherwise a split inside a
    merged dimension does not give contiguous shards.
    """
    shard_axes = [
        merge_axes([axes[name] for name in dimension if name in axes]) for dimension in dimensions
    ]
    if not windows:
        return Layout(shape, tuple(shard_axes))
    windowed_shards: list[WindowedShards | None] = [None] * len(shape)
    fill = 0.0
    for window in windows:
        if window.axis not in axes or axes[window.axis].degree == 1:
            continue
        degree = axes[window.axis].degree
        size = shape[window.dimension]
        shards = WindowedShards(window.stride, window.offset, window.reach).joined(
            window.count // degree
        )
        shard_axes[window.dimension] = merge_axes([axes[window.axis]])
        is_even = shards == WindowedShards(size // degree, 0, size // degree) and size % degree == 0
        windowed_shards[window.dimension] = None if is_even else shards
        if shards.offset < 0 or (degree - 1) * shards.step + shards.offset + shards.length > size:
            fill = window.fill  # A shard extends beyond the tensor.
    return Layout(
        shape,
        tuple(shard_axes),
        windows=tuple(windowed_shards) if any(windowed_shards) else (),
        fill=fill,
    )


def result_layout(
    space: Space,
    dimensions: tuple[Dimension, ...],
    shape: tuple[int, ...],
    axes: Mapping[str, MeshAxis],
) -> Layout:
    """Return the layout that a node produces for a result.

    A split axis that the result does not contain makes it a partial mean if the axis has kind MEAN.
    If the kind is AGREED, the devices hold copies. For any other kind the result is a partial sum.
    """
    sharded = operand_layout(dimensions, shape, axes)
    result_axes = {name for dimension in dimensions for name in dimension}
    sums: list[MeshAxis] = []
    means: list[MeshAxis] = []
    for name, axis in axes.items():
        if name not in result_axes and (kind := space.axis(name).kind) is not AxisKind.AGREED:
            (means if kind is AxisKind.MEAN else sums).append(axis)
    return (
        Layout(sharded.shape, sharded.shard_axes, merge_axes(sums), merge_axes(means))
        if sums or means
        else sharded
    )


def even_degree_hint(extent: int, degree: int) -> str:
    """Return a hint for a dimension of `extent` elements that `degree` devices cannot shard evenly.

    It suggests a padded size, and the largest smaller degree that divides the size if there is one.
    """
    divisors = [count for count in range(2, min(degree, extent) + 1) if extent % count == 0]
    padded = -(-extent // degree) * degree
    fewer = f", or use {divisors[-1]} {plural(divisors[-1], 'device')}" if divisors else ""
    return f"pad it to {padded} in the model{fewer}"


def is_even_split(space: Space, axis: str, degree: int) -> bool:
    """True if splitting `axis` alone into `degree` parts satisfies `are_even_splits`."""
    return are_even_splits(space, (Split(axis, degree),))


def are_even_splits(space: Space, splits: Sequence[Split]) -> bool:
    """True if `splits` together give each device one contiguous, equally large shard of each
    tensor.

    Each degree must divide the size of its axis. In a dimension that merges several axes, an axis
    may be split only if all axes outside of it in that dimension are split down to size 1.
    """
    degrees = {split.axis: split.degree for split in splits}
    sizes = space.axis_sizes()
    if any(size % degrees.get(axis, 1) for axis, size in sizes.items()):
        return False
    return all(is_one_range(dimension, sizes, degrees) for dimension in merged_dimensions(space))


def merged_dimensions(space: Space) -> tuple[Dimension, ...]:
    """Return the distinct dimensions of the operands and results that merge several axes."""
    tensors = (*space.operands, *space.results)
    mixed = (dimension for tensor in tensors for dimension in tensor or () if len(dimension) > 1)
    return tuple(dict.fromkeys(mixed))


def is_one_range(
    dimension: Dimension, extents: Mapping[str, int], degrees: Mapping[str, int]
) -> bool:
    """True if the splits give each device one contiguous range of a merged dimension.

    `degrees` divide `extents`. The condition: the axes outside of each split axis have local size
    1.
    """
    outside = 1
    for name in dimension:
        degree = degrees.get(name, 1)
        if outside > 1 and degree > 1:
            return False
        outside *= extents[name] // degree
    return True


def missing_elements(source: Layout, target: Layout, group: int) -> NDArray[np.int64]:
    """Return, for each position of a group, the elements that the position needs under `target` and
    lacks under `source`.

    The result has shape [group]. Elements beyond the tensor do not count.
    """
    if not target.shape:
        return np.zeros(group, dtype=np.int64)
    need_start, need_stop = _index_ranges_by_device(target, group)
    have_start, have_stop = _index_ranges_by_device(source, group)
    need = np.maximum(need_stop - need_start, 0).prod(axis=1)
    overlap = np.minimum(need_stop, have_stop) - np.maximum(need_start, have_start)
    missing: NDArray[np.int64] = need - np.maximum(overlap, 0).prod(axis=1)
    return missing


def layout_over_neighbours(layout: Layout, size: int) -> Layout:
    """Return the layout over groups of `size` neighbouring devices, each group counted as one
    device.

    A group's shard is the union of its devices' shards if that is one contiguous slice; otherwise
    it is the smallest slice that contains all of them.
    """
    windows = layout.windows or (None,) * len(layout.shard_axes)
    pairs = [
        sharded_over_neighbours(axes, window, size)
        for axes, window in zip(layout.shard_axes, windows, strict=True)
    ]
    shard_axes, windows = zip(*pairs, strict=True) if pairs else ((), ())
    return Layout(layout.shape, shard_axes, windows=windows if layout.windows else ())


def sharded_over_neighbours(
    axes: MeshAxes, window: WindowedShards | None, size: int
) -> tuple[MeshAxes, WindowedShards | None]:
    """Return (mesh axes, windowed shards) of one dimension over groups of `size` neighbouring
    devices.

    `axes` are the mesh axes that shard the dimension, and `window` its windowed shards or None if
    the shards are even. The result keeps the mesh axes up to the first one that lies inside a
    group.
    """
    found = []
    for axis in axes:
        span = axis.stride * axis.degree
        if axis.stride % size == 0:
            found.append(MeshAxis(axis.degree, axis.stride // size))
            continue
        if span > size and span % size == 0 and size % axis.stride == 0:
            # The outer part of the axis distinguishes groups; its inner part lies inside a group.
            found.append(MeshAxis(span // size, 1))
        break
    outer = merge_axes(found)
    return outer, window.joined(
        total_degree(axes) // total_degree(outer)
    ) if window and outer else None


def _index_ranges_by_device(
    layout: Layout, group: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (starts, stops), both of shape [group, dimensions]: the index range of each device's
    shard, clipped to the tensor.
    """
    positions = np.arange(group)
    starts = np.zeros((group, len(layout.shape)), dtype=np.int64)
    stops = np.zeros_like(starts)
    for dimension, (shards, axes) in enumerate(
        zip(layout.shard_ranges(), layout.shard_axes, strict=True)
    ):
        starts[:, dimension] = coordinate_along(axes, positions) * shards.step + shards.offset
        stops[:, dimension] = starts[:, dimension] + shards.length
    return np.maximum(starts, 0), np.minimum(stops, layout.shape)


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """A slice of a tensor that the device at position `source` sends to the device at position
    `target`.

    Both may be the same position. `part` is in coordinates of the full tensor.
    """

    source: int
    target: int
    part: TensorSlice


def slice_transfers(source: Layout, target: Layout, group: int) -> Iterator[SliceTransfer]:
    """Yield the transfers that produce layout `target` from layout `source`, ordered by target
    position.

    `source` has even shards and no partial sums. Of several positions that hold a shard, the
    nearest to the target by number sends: a device that has the data sends it to itself, and
    otherwise the sender is often in the same node. Elements beyond the tensor are not sent.
    """
    holders = holders_by_shard(source, group)
    for position in range(group):
        need = target.shard(position)
        for shard, positions in holders:
            overlap = shard.intersect(need)
            if overlap is not None:
                nearest = min(positions, key=lambda holder: abs(holder - position))
                yield SliceTransfer(nearest, position, overlap)


@dataclass(frozen=True, slots=True)
class Redistribution:
    """One step of a change of layout, which all devices of a group execute together.

    `over` are the mesh axes of the process groups that communicate. `kind` is one of:

        all_reduce      partial sums -> their sum
        reduce_scatter  partial sums -> shards of the sum along `dimension`
        all_gather      shards along `dimension` -> the dimension in full
        slice           a copy -> this device's shard, without communication
        all_to_all      shards along `origin` -> shards along `dimension`
        redistribute    any shards -> any shards, by point-to-point transfers (`slice_transfers`)

    Kinds `slice` and `redistribute` also produce shards that are read through windows. `over` is ()
    for `redistribute`, and for a `slice` that produces windowed shards.
    """

    kind: str
    source: Layout
    result: Layout
    over: MeshAxes = ()
    dimension: int = 0
    origin: int = 0

    @property
    def divisor(self) -> int:
        """Return the number by which to divide the reduced sum: the degree of the partial means
        that this step reduces.
        """
        return total_degree(self.source.means) // total_degree(self.result.means)
