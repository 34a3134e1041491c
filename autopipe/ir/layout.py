"""Layouts of tensors on a group of devices, and the data that a change of layout moves.

A `Layout` contains the information that DTensor calls placements: which axes of the device mesh
shard which dimension, and over which mesh axes the devices hold partial sums.

The volume of a change of layout is t_x of PaSE (Elango, IPDPS 2021, section II): the number of
elements that a device needs and does not have. At an outer level of the cluster, nodes take the
role of devices, so each missing element is sent to a node once. The cost model and code generation
both use this module, so the predicted communication equals the communication that runs.
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
    """A rectangular slice of a tensor: a half-open index range [start, stop) per dimension."""

    starts: tuple[Index, ...]
    stops: tuple[Index, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements in each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slice as an index for arrays and tensors."""
        return tuple(map(slice, self.starts, self.stops))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Return the intersection with `other`, or None if it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return TensorSlice(starts, stops)

    def shifted(self, distances: Iterable[int]) -> TensorSlice:
        """Return this slice moved by `distances`, a signed number of elements for each
        dimension.
        """
        steps = tuple(distances)
        return TensorSlice(tuple(map(add, self.starts, steps)), tuple(map(add, self.stops, steps)))

    def relative_to(self, outer: TensorSlice) -> TensorSlice:
        """Return this slice relative to `outer`: the first element of `outer` has index 0 in each
        dimension.
        """
        return self.shifted(-start for start in outer.starts)

    def moved_between(self, source: TensorSlice, target: TensorSlice) -> TensorSlice:
        """Return this slice moved as far as the first element of `target` is from the first element
        of `source`.
        """
        return self.shifted(map(sub, target.starts, source.starts))


def full_slice(shape: tuple[int, ...]) -> TensorSlice:
    """Return the slice of a tensor with this shape that contains all of its elements."""
    return TensorSlice((0,) * len(shape), shape)


class MeshAxis(NamedTuple):
    """An axis of the device mesh that a group of devices forms.

    The device at position p of the group has the coordinate (p // stride) % degree along this axis.
    """

    degree: int
    stride: int

    def coordinate(self, position: int) -> int:
        """Return the coordinate along this axis of the device at a position of the group."""
        return position // self.stride % self.degree


MeshAxes = tuple[MeshAxis, ...]
"""Mesh axes, ordered from the outermost to the innermost."""


def mesh_axes_of(splits: Sequence[Split], group: int) -> MeshAxes:
    """Return one mesh axis for each of `splits`, for a group of `group` devices.

    The first split has the outermost axis, with the largest stride. The product of the degrees must
    divide `group`. If it is smaller than `group`, consecutive devices hold copies.
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
    """Return the mesh axis of each split, by the name of the iteration axis that is split. The
    order is from the outermost to the innermost mesh axis.
    """
    return {
        split.axis: axis for split, axis in zip(splits, mesh_axes_of(splits, group), strict=True)
    }


def merge_axes(axes: Iterable[MeshAxis]) -> MeshAxes:
    """Return the canonical form of mesh axes, which are ordered from the outermost to the
    innermost.

    Two neighbouring axes are merged if the stride of the outer one is the product of stride and
    degree of the inner one. Axes of degree 1 are removed.
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
"""The position of a device in its group, or an array of positions."""


def combined_coordinate(axes: MeshAxes, position: Positions) -> Positions:
    """Return the coordinate of each position along several mesh axes, combined to one number.

    `axes` are ordered from the outermost to the innermost; the number changes fastest along the
    innermost axis.
    """
    index = position - position
    for axis in axes:
        index = index * axis.degree + position // axis.stride % axis.degree
    return index


def total_degree(axes: Iterable[MeshAxis]) -> int:
    """Return the product of the degrees of mesh axes."""
    return math.prod([axis.degree for axis in axes])


def group_members(axes: MeshAxes, position: int) -> tuple[int, ...]:
    """Return the positions of the devices in the process group over `axes` that contains the device
    at `position`.

    The coordinates of the members are equal along all other mesh axes. The order is row-major over
    `axes`.
    """
    found = [position - sum(axis.coordinate(position) * axis.stride for axis in axes)]
    for axis in axes:
        found = [each + place * axis.stride for each in found for place in range(axis.degree)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WindowedShards:
    """The shards of a dimension that an operator reads through windows, as a convolution or pooling
    does.

    Shard i contains `length` elements from index i · step + offset on. Neighbouring shards may
    overlap or leave gaps. The first and the last shards may extend beyond the tensor.
    """

    step: int
    offset: int
    length: int

    def joined(self, count: int) -> WindowedShards:
        """Return the shards that result if groups of `count` consecutive shards are joined."""
        return WindowedShards(self.step * count, self.offset, (count - 1) * self.step + self.length)


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of a tensor over the devices of a group (what DTensor calls its placements).

    `shard_axes[i]` are the mesh axes that shard dimension i, from the outermost to the innermost.
    Over the mesh axes `sums`, the devices hold partial sums, which add up to the tensor; over
    `means`, they hold partial means, whose average is the tensor. Over all other mesh axes, they
    hold copies. Mesh axes are merged (`merge_axes`), so that equal distributions compare equal.

    The shards of a dimension have equal sizes and do not overlap, except for an operand that is
    read through windows. `windows[i]` has the windowed shards of dimension i, or is None if its
    shards are even; `windows` is () if all dimensions have even shards. `fill` is the value of
    elements beyond the tensor. Results of nodes always have even shards.
    """

    shape: tuple[int, ...]
    shard_axes: tuple[MeshAxes, ...]
    sums: MeshAxes = ()
    means: MeshAxes = ()
    windows: tuple[WindowedShards | None, ...] = ()
    fill: float = 0.0
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # There are few different layouts, but each operand of each node is a key of a cache, so the
        # hash is stored.
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
        """Mesh axes over which devices hold partial sums or means, from the outermost to the
        innermost.

        An axis of sums and an axis of means are not merged, because one reduction can cover a part
        of each axis, and the rest of both must remain.
        """
        return tuple(sorted(self.sums + self.means, key=lambda axis: -axis.stride))

    @property
    def shard_count(self) -> int:
        """Number of different shards: the product of the degrees of `shard_axes`."""
        return total_degree(axis for axes in self.shard_axes for axis in axes)

    def after_all_reduce(self) -> Layout:
        """Return the layout after an all-reduce of the partial sums and means. The shards
        remain.
        """
        return Layout(self.shape, self.shard_axes)

    def with_even_shards(self) -> Layout:
        """Return the layout with even shards along the same mesh axes, without windows.

        A dimension that is read through windows is no longer sharded if the degree does not divide
        its size.
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
        """Return the index ranges of the shards of each dimension. Even shards have offset 0, and
        their step equals their length.
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
        """Return the shape of the shard of a device."""
        if not self.windows:
            return tuple(
                size // total_degree(axes)
                for size, axes in zip(self.shape, self.shard_axes, strict=True)
            )
        return tuple(shards.length for shards in self.shard_ranges())

    @property
    def local_elements(self) -> int:
        """Number of elements of the shard of a device."""
        return (
            math.prod(self.local_shape())
            if self.windows
            else math.prod(self.shape) // self.shard_count
        )

    def copies_of_first_shard(self, group: int) -> tuple[int, ...]:
        """Return the positions of the devices, of `group` devices, that hold the same shard as
        the device at position 0. In a partial layout, these devices hold partial sums or means
        of the same shard.
        """
        positions = np.arange(group)
        difference = sum(
            (combined_coordinate(axes, positions) for axes in self.shard_axes),
            np.zeros_like(positions),
        )
        return tuple(np.flatnonzero(difference == 0).tolist())

    def shard(self, position: int) -> TensorSlice:
        """Return the slice of the tensor that the device at `position` holds. A shard that is read
        through windows may extend beyond the tensor.
        """
        starts = []
        stops = []
        for shards, axes in zip(self.shard_ranges(), self.shard_axes, strict=True):
            starts.append(combined_coordinate(axes, position) * shards.step + shards.offset)
            stops.append(starts[-1] + shards.length)
        return TensorSlice(tuple(starts), tuple(stops))


@lru_cache(maxsize=1024)
def holders_by_shard(layout: Layout, group: int) -> tuple[tuple[TensorSlice, tuple[int, ...]], ...]:
    """Return pairs (shard, positions): each different shard, and the positions of all devices, of
    `group` devices, that hold it. Shards are ordered by their first position.
    """
    found: dict[TensorSlice, list[int]] = {}
    for position in range(group):
        found.setdefault(layout.shard(position), []).append(position)
    return tuple((shard, tuple(positions)) for shard, positions in found.items())


def replicated_layout(shape: tuple[int, ...]) -> Layout:
    """Return the layout in which each device holds the full tensor."""
    return Layout(shape, ((),) * len(shape))


def shard_copies(layout: Layout, group: int) -> Layout:
    """Return the layout in which devices with equal shards divide the shard among them, so that no
    two devices hold equal data.

    The first dimension whose local size is divisible by the number of copies is sharded. Return
    `layout` unchanged if there are no copies, if no dimension is divisible, if the layout has
    windows or partial sums, or if the copies do not correspond to mesh axes.
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
    """Return the layout in which the devices of a node need an operand, or hold a result.

    `dimensions` are the axes of the operand's dimensions in the node's iteration space, and `shape`
    is its shape. `axes` is the result of `mesh_axis_by_name` for the node's splits. `windows` are
    the operand's windowed dimensions (`Space.windows_of`). The splits must satisfy
    `are_even_splits`; otherwise the shards of a merged dimension would not be contiguous.
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
            # The layout contains `fill`, the value of elements beyond the tensor, only if a shard
            # extends beyond the tensor.
            fill = window.fill
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
    """Return the layout in which the devices of a node produce a result.

    If an axis that the result lacks is split, the devices hold partial means if its kind is MEAN,
    copies if its kind is AGREED, and partial sums otherwise.
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
    """Return a hint for a dimension of `extent` elements that cannot be divided into `degree` equal
    shards: a size to which it can be padded, and the largest smaller degree above 1 that divides
    it, if there is one.
    """
    divisors = [count for count in range(2, min(degree, extent) + 1) if extent % count == 0]
    padded = -(-extent // degree) * degree
    fewer = f", or use {divisors[-1]} {plural(divisors[-1], 'device')}" if divisors else ""
    return f"pad it to {padded} in the model{fewer}"


def is_even_split(space: Space, axis: str, degree: int) -> bool:
    """Return True if a split of only `axis` into `degree` parts satisfies `are_even_splits`."""
    return are_even_splits(space, (Split(axis, degree),))


def are_even_splits(space: Space, splits: Sequence[Split]) -> bool:
    """Return True if, with `splits`, the shard of each tensor on each device is contiguous and all
    shards have one size.

    Each degree must divide the size of its axis. In a dimension that merges several axes, an axis
    may be split only if all axes outside of it in the dimension are split down to size 1.
    """
    degrees = {split.axis: split.degree for split in splits}
    sizes = space.axis_sizes()
    if any(size % degrees.get(axis, 1) for axis, size in sizes.items()):
        return False
    return all(is_one_range(dimension, sizes, degrees) for dimension in merged_dimensions(space))


def merged_dimensions(space: Space) -> tuple[Dimension, ...]:
    """Return the distinct dimensions of operands and results that merge several axes, each as a
    tuple of axis names.
    """
    tensors = (*space.operands, *space.results)
    mixed = (dimension for tensor in tensors for dimension in tensor or () if len(dimension) > 1)
    return tuple(dict.fromkeys(mixed))


def is_one_range(
    dimension: Dimension, extents: Mapping[str, int], degrees: Mapping[str, int]
) -> bool:
    """Return True if the shard of a merged dimension is one contiguous range on each device: all
    axes outside of a split axis have local size 1. The degrees must divide the sizes `extents`.
    """
    outside = 1
    for name in dimension:
        degree = degrees.get(name, 1)
        if outside > 1 and degree > 1:
            return False
        outside *= extents[name] // degree
    return True


def missing_elements(source: Layout, target: Layout, group: int) -> NDArray[np.int64]:
    """Return, for each position of a group, the number of elements that the device needs for the
    layout `target` and does not have in the layout `source`.

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
    """Return the layout over groups of `size` neighbouring devices, where each group counts as one
    device.

    The shard of a group is the smallest slice that contains the shards of its devices. If the
    shards form one contiguous slice, it is their union.
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
    devices, where each group counts as one device.

    `axes` are the mesh axes that shard the dimension, and `window` its windowed shards, or None if
    the shards are even. The result contains the mesh axes before the first one that lies inside a
    group.
    """
    found = []
    for axis in axes:
        span = axis.stride * axis.degree
        if axis.stride % size == 0:
            found.append(MeshAxis(axis.degree, axis.stride // size))
            continue
        if span > size and span % size == 0 and size % axis.stride == 0:
            # The mesh axis extends over several groups of `size` devices. Only its outer part,
            # which distinguishes groups, is added to the result; its inner part is inside a group.
            found.append(MeshAxis(span // size, 1))
        break
    outer = merge_axes(found)
    return outer, window.joined(
        total_degree(axes) // total_degree(outer)
    ) if window and outer else None


def _index_ranges_by_device(
    layout: Layout, group: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (starts, stops), both of shape [group, dimensions]: the index ranges of the shard of
    each device, limited to the tensor.
    """
    positions = np.arange(group)
    starts = np.zeros((group, len(layout.shape)), dtype=np.int64)
    stops = np.zeros_like(starts)
    for dimension, (shards, axes) in enumerate(
        zip(layout.shard_ranges(), layout.shard_axes, strict=True)
    ):
        starts[:, dimension] = combined_coordinate(axes, positions) * shards.step + shards.offset
        stops[:, dimension] = starts[:, dimension] + shards.length
    return np.maximum(starts, 0), np.minimum(stops, layout.shape)


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """The transfer of a slice of a tensor from the device at position `source` to the device at
    position `target`.

    Both positions may be equal. `part` is the slice of the full tensor.
    """

    source: int
    target: int
    part: TensorSlice


def slice_transfers(source: Layout, target: Layout, group: int) -> Iterator[SliceTransfer]:
    """Yield the transfers that change the layout of a tensor from `source` to `target`, ordered by
    target position.

    `source` must have even shards and no partial sums. If several devices hold a shard, the one
    with the nearest position to the target sends it: a device that has the data itself needs no
    communication, and a near device is often in the same node. Elements beyond the tensor are not
    sent.
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
        """The number by which the reduced sum is divided: the total degree of the mesh axes of
        partial means that this step reduces; 1 for sums.
        """
        return total_degree(self.source.means) // total_degree(self.result.means)
