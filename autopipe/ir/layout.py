"""Who holds what of a tensor, and what has to move where a group is to hold it in another layout.

The volume is t_x of PaSE (IPDPS 2021, section III): what a device needs and does not have. At an
outer level of the cluster it is a node that lacks what its devices need and none of them has: each
block enters a node once. The same arithmetic gives exchanges in a stage, messages between stages,
and what either costs: what is predicted is what runs.
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
    """A block of a tensor: for each dimension a half-open range [start, stop)."""

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
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return TensorSlice(starts, stops)

    def shifted(self, distances: Iterable[int]) -> TensorSlice:
        steps = tuple(distances)
        return TensorSlice(tuple(map(add, self.starts, steps)), tuple(map(add, self.stops, steps)))

    def within(self, outer: TensorSlice) -> TensorSlice:
        """The same block in coordinates relative to `outer`."""
        return self.shifted(-start for start in outer.starts)

    def moved(self, source: TensorSlice, target: TensorSlice) -> TensorSlice:
        """The block that lies in `target` as this one lies in `source`."""
        return self.shifted(map(sub, target.starts, source.starts))


def full_slice(shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice((0,) * len(shape), shape)


class MeshAxis(NamedTuple):
    """An axis of the mesh that a group's devices form: the device at position P has place (P //
    stride) % degree.
    """

    degree: int
    stride: int

    def coordinate(self, position: int) -> int:
        return position // self.stride % self.degree


MeshAxes = tuple[MeshAxis, ...]
"""Outer to inner."""


def mesh_axes_of(splits: Sequence[Split], group: int) -> MeshAxes:
    """One axis for each split, outer to inner over `group` devices; those that the degrees leave
    over are innermost. The product of the degrees must divide `group`.
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
    """The axis of the mesh that each split axis of a space lies along, outer to inner."""
    return {
        split.axis: axis for split, axis in zip(splits, mesh_axes_of(splits, group), strict=True)
    }


def merge_axes(axes: Iterable[MeshAxis]) -> MeshAxes:
    """The one spelling of axes, outer to inner: neighbours that count on in one another are one."""
    found: list[MeshAxis] = []
    for axis in axes:
        if axis.degree == 1:
            continue
        if found and found[-1].stride == axis.stride * axis.degree:
            axis = MeshAxis(found.pop().degree * axis.degree, axis.stride)
        found.append(axis)
    return tuple(found)


Positions = TypeVar("Positions", int, NDArray[np.int64])
"""The position of a device in its group, or of several."""


def coordinate_along(axes: MeshAxes, position: Positions) -> Positions:
    """Where devices stand along several axes, outer to inner, counted as one."""
    index = position - position
    for axis in axes:
        index = index * axis.degree + position // axis.stride % axis.degree
    return index


def degree_of(axes: Iterable[MeshAxis]) -> int:
    return math.prod([axis.degree for axis in axes])


def group_members(axes: MeshAxes, position: int) -> tuple[int, ...]:
    """Positions of the devices that differ from the one at `position` along `axes` alone, in the
    order of the axes.
    """
    found = [position - sum(axis.coordinate(position) * axis.stride for axis in axes)]
    for axis in axes:
        found = [each + place * axis.stride for each in found for place in range(axis.degree)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WindowedShards:
    """Blocks of a dimension: block i is the `length` elements from i · step + offset on. Blocks may
    overlap, leave elements out, and stick out of the tensor at its ends.
    """

    step: int
    offset: int
    length: int

    def joined(self, count: int) -> WindowedShards:
        """The same for `count` neighbouring blocks taken as one."""
        return WindowedShards(self.step * count, self.offset, (count - 1) * self.step + self.length)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stage's group holds one tensor.

    `shard_axes[i]` are the mesh axes that cut dimension i, outer to inner. Over `sums` the devices hold
    shares of a sum, over `means` equal shares of a mean: along all other axes they hold copies.
    Axes are merged, so that two layouts are equal where they mean the same.

    Blocks are even, but for an operand that is read through windows: there `windows[i]` says what
    each block has of dimension i (None where it is even, () where all are), with `fill` where
    blocks stick out. No result is left so.
    """

    shape: tuple[int, ...]
    shard_axes: tuple[MeshAxes, ...]
    sums: MeshAxes = ()
    means: MeshAxes = ()
    windows: tuple[WindowedShards | None, ...] = ()
    fill: float = 0.0
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Layouts are few, and looked up for each operand of each node.
        if (known := self._hash) is None:
            known = hash(
                (self.shape, self.shard_axes, self.sums, self.means, self.windows, self.fill)
            )
            object.__setattr__(self, "_hash", known)
        return known

    @property
    def is_partial(self) -> bool:
        return bool(self.sums or self.means)

    @property
    def partial_over(self) -> MeshAxes:
        """The axes over which devices hold shares, outer to inner."""
        return merge_axes(sorted(self.sums + self.means, key=lambda axis: -axis.stride))

    @property
    def shard_count(self) -> int:
        return degree_of(axis for axes in self.shard_axes for axis in axes)

    def reduced(self) -> Layout:
        """The same blocks when shares have been added up."""
        return Layout(self.shape, self.shard_axes)

    def even(self) -> Layout:
        """Even blocks along the same axes; the dimensions read through windows whole where these do
        not divide them.
        """
        if not self.windows:
            return self
        dimensions = zip(self.shape, self.shard_axes, self.windows, strict=True)
        cuts = (
            () if window and extent % degree_of(axes) else axes
            for extent, axes, window in dimensions
        )
        return Layout(self.shape, tuple(cuts))

    def blocks(self) -> tuple[WindowedShards, ...]:
        """For each dimension what each block along it has."""
        even = [
            extent // degree_of(axes)
            for extent, axes in zip(self.shape, self.shard_axes, strict=True)
        ]
        windows = self.windows or (None,) * len(even)
        return tuple(
            window or WindowedShards(extent, 0, extent)
            for window, extent in zip(windows, even, strict=True)
        )

    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's block."""
        if not self.windows:
            return tuple(
                extent // degree_of(axes)
                for extent, axes in zip(self.shape, self.shard_axes, strict=True)
            )
        return tuple(block.length for block in self.blocks())

    @property
    def local_elements(self) -> int:
        return (
            math.prod(self.local_shape())
            if self.windows
            else math.prod(self.shape) // self.shard_count
        )

    def copies_of_first_shard(self, group: int) -> tuple[int, ...]:
        """The positions, of `group`, of the devices that hold the same block as the one at position
        0.
        """
        positions = np.arange(group)
        apart = sum(
            (coordinate_along(axes, positions) for axes in self.shard_axes),
            np.zeros_like(positions),
        )
        return tuple(np.flatnonzero(apart == 0).tolist())

    def shard(self, position: int) -> TensorSlice:
        """TensorSlice held by the device at `position` of the group; blocks read through windows may exceed
        the tensor.
        """
        starts = []
        stops = []
        for block, axes in zip(self.blocks(), self.shard_axes, strict=True):
            starts.append(coordinate_along(axes, position) * block.step + block.offset)
            stops.append(starts[-1] + block.length)
        return TensorSlice(tuple(starts), tuple(stops))


@lru_cache(maxsize=1024)
def holders_by_shard(layout: Layout, group: int) -> tuple[tuple[TensorSlice, tuple[int, ...]], ...]:
    """Each block, in the order of the first position that holds it, with all positions of `group`
    that do. Layers repeat, so few layouts are asked for often.
    """
    found: dict[TensorSlice, list[int]] = {}
    for position in range(group):
        found.setdefault(layout.shard(position), []).append(position)
    return tuple((box, tuple(positions)) for box, positions in found.items())


def replicated(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, ((),) * len(shape))


def sliced(layout: Layout, group: int) -> Layout:
    """The layout in which those of `group` devices that hold copies have a slice each, along the
    first dimension that allows equal ones; the same layout where none does.
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
    over = merge_axes([*copies, MeshAxis(outer, 1)])
    if not over or layout.windows or layout.is_partial:
        return layout
    for dimension, extent in enumerate(layout.local_shape()):
        if extent % degree_of(over) == 0:
            cuts = list(layout.shard_axes)
            cuts[dimension] = merge_axes([*cuts[dimension], *over])
            return Layout(layout.shape, tuple(cuts))
    return layout


def operand_layout(
    dimensions: tuple[Dimension, ...],
    shape: tuple[int, ...],
    axes: Mapping[str, MeshAxis],
    windows: Sequence[Windowed] = (),
) -> Layout:
    """Layout in which devices need an operand, or hold a result, of a node whose splits have these
    `mesh_axis_by_name`. `windows` are the operand's (`Space.windows_of`). A cut inside a merged dimension is
    a block only where `is_even_split` says so; callers keep to such splits.
    """
    cuts = [
        merge_axes([axes[name] for name in dimension if name in axes]) for dimension in dimensions
    ]
    if not windows:
        return Layout(shape, tuple(cuts))
    found: list[WindowedShards | None] = [None] * len(shape)
    fill = 0.0
    for each in windows:
        if each.axis not in axes or axes[each.axis].degree == 1:
            continue
        degree = axes[each.axis].degree
        extent = shape[each.dimension]
        block = WindowedShards(each.stride, each.offset, each.reach).joined(each.count // degree)
        cuts[each.dimension] = merge_axes([axes[each.axis]])
        is_even = (
            block == WindowedShards(extent // degree, 0, extent // degree) and extent % degree == 0
        )
        found[each.dimension] = None if is_even else block
        if block.offset < 0 or (degree - 1) * block.step + block.offset + block.length > extent:
            fill = each.fill  # A block sticks out of the tensor.
    return Layout(shape, tuple(cuts), windows=tuple(found) if any(found) else (), fill=fill)


def result_layout(
    space: Space,
    dimensions: tuple[Dimension, ...],
    shape: tuple[int, ...],
    axes: Mapping[str, MeshAxis],
) -> Layout:
    """The layout in which a node leaves a result: like an operand's, and partial over split axes
    that it reduces.
    """
    held = operand_layout(dimensions, shape, axes)
    present = {name for dimension in dimensions for name in dimension}
    sums: list[MeshAxis] = []
    means: list[MeshAxis] = []
    for name, axis in axes.items():
        if name not in present and (kind := space.axis(name).kind) is not AxisKind.AGREED:
            (means if kind is AxisKind.MEAN else sums).append(axis)
    return (
        Layout(held.shape, held.shard_axes, merge_axes(sums), merge_axes(means))
        if sums or means
        else held
    )


def even_degree_hint(extent: int, degree: int) -> str:
    """Suggest an extent that `degree` devices can share equally."""
    divisors = [count for count in range(2, min(degree, extent) + 1) if extent % count == 0]
    padded = -(-extent // degree) * degree
    others = f", or take {divisors[-1]} {plural(divisors[-1], 'device')}" if divisors else ""
    return f"pad it to {padded} in the model{others}"


def is_even_split(space: Space, axis: str, degree: int) -> bool:
    return are_even_splits(space, (Split(axis, degree),))


def are_even_splits(space: Space, splits: Sequence[Split]) -> bool:
    """True if `splits` together leave every device one block of each tensor, equal to the others'.
    In a dimension made of several axes an inner one may be cut where all those outside it are cut
    to extent one.
    """
    degrees = {split.axis: split.degree for split in splits}
    extents = space.extents()
    if any(extent % degrees.get(axis, 1) for axis, extent in extents.items()):
        return False
    return all(is_one_range(dimension, extents, degrees) for dimension in merged_dimensions(space))


def merged_dimensions(space: Space) -> tuple[Dimension, ...]:
    """The different dimensions that several axes make up."""
    tensors = (*space.operands, *space.results)
    mixed = (dimension for tensor in tensors for dimension in tensor or () if len(dimension) > 1)
    return tuple(dict.fromkeys(mixed))


def is_one_range(
    dimension: Dimension, extents: Mapping[str, int], degrees: Mapping[str, int]
) -> bool:
    """True if `degrees`, which divide `extents`, cut no axis of a dimension inside of one not down
    to extent one.
    """
    outside = 1
    for name in dimension:
        degree = degrees.get(name, 1)
        if outside > 1 and degree > 1:
            return False
        outside *= extents[name] // degree
    return True


def missing_elements(source: Layout, target: Layout, group: int) -> NDArray[np.int64]:
    """For each position of a group, the elements of its block under `target` that it lacks under
    `source`.
    """
    if not target.shape:
        return np.zeros(group, dtype=np.int64)
    (first, last) = _ranges(target, group)
    (held, end) = _ranges(source, group)
    need = np.maximum(last - first, 0).prod(axis=1)
    overlap = np.minimum(last, end) - np.maximum(first, held)
    missing: NDArray[np.int64] = need - np.maximum(overlap, 0).prod(axis=1)
    return missing


def of_neighbours(layout: Layout, size: int) -> Layout:
    """The layout as each `size` neighbouring devices hold it together, counted as one device. Where
    neighbours' blocks do not make up one block, it is the smallest that has them all.
    """
    windows = layout.windows or (None,) * len(layout.shard_axes)
    cut = [
        sharded_over_neighbours(axes, window, size)
        for axes, window in zip(layout.shard_axes, windows, strict=True)
    ]
    cuts, windows = zip(*cut, strict=True) if cut else ((), ())
    return Layout(layout.shape, cuts, windows=windows if layout.windows else ())


def sharded_over_neighbours(
    axes: MeshAxes, window: WindowedShards | None, size: int
) -> tuple[MeshAxes, WindowedShards | None]:
    """The same along one dimension, cut by `axes` and read through `window`, if by any."""
    # What tells one set of neighbours from another, up to the first axis that lies within one.
    found = []
    for axis in axes:
        span = axis.stride * axis.degree
        if axis.stride % size == 0:
            found.append(MeshAxis(axis.degree, axis.stride // size))
            continue
        if span > size and span % size == 0 and size % axis.stride == 0:
            found.append(
                MeshAxis(span // size, 1)
            )  # The axis's outer part: it goes on inside of a set.
        break
    outer = merge_axes(found)
    return outer, window.joined(degree_of(axes) // degree_of(outer)) if window and outer else None


def _ranges(layout: Layout, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the part of each device's block that lies in the tensor begins and ends, [group,
    dimensions].
    """
    positions = np.arange(group)
    starts = np.zeros((group, len(layout.shape)), dtype=np.int64)
    stops = np.zeros_like(starts)
    for dimension, (block, axes) in enumerate(zip(layout.blocks(), layout.shard_axes, strict=True)):
        starts[:, dimension] = coordinate_along(axes, positions) * block.step + block.offset
        stops[:, dimension] = starts[:, dimension] + block.length
    return np.maximum(starts, 0), np.minimum(stops, layout.shape)


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """A block, in coordinates of the whole tensor, that one position of a group gives to another or
    to itself.
    """

    source: int
    target: int
    part: TensorSlice


def slice_transfers(source: Layout, target: Layout, group: int) -> Iterator[SliceTransfer]:
    """The moves that make `target` of `source`, whose blocks are even and no shares of sums, by
    target. A device keeps what it has. Of several holders the nearest one sends, which mostly is in
    the same node. What of a block sticks out of the tensor nobody sends.
    """
    holders = holders_by_shard(source, group)
    for position in range(group):
        need = target.shard(position)
        for box, places in holders:
            common = box.intersect(need)
            if common is not None:
                yield SliceTransfer(
                    min(places, key=lambda place: abs(place - position)), position, common
                )


@dataclass(frozen=True, slots=True)
class Redistribution:
    """One change of a value's layout: what a group does together, over the axes `over` of its mesh.

    `kind` is `all_reduce` (shares of a sum → the sum), `reduce_scatter` (shares → blocks of the sum
    along `dimension`), `all_gather` (blocks along `dimension` → all of it), `slice` (of a copy this
    device's block; nothing is sent), `all_to_all` (blocks along `origin` → blocks along
    `dimension`) or `redistribute` (any blocks → any blocks: what a device lacks is sent by a device
    near by that has it). `slice` and `redistribute` also lead to blocks that are read through
    windows; a slice is then over no axes in particular.
    """

    kind: str
    source: Layout
    result: Layout
    over: MeshAxes = ()
    dimension: int = 0
    origin: int = 0

    @property
    def divisor(self) -> int:
        """Of a sum that stands for a mean."""
        return degree_of(self.source.means) // degree_of(self.result.means)
