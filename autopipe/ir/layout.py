"""Who holds what of a tensor: boxes, one a device.

The same arithmetic tells what must be exchanged inside a stage, what is sent between stages with different device
groups, and what either costs, so that what is predicted is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopipe.ir.placement import Split
from autopipe.ir.space import AxisKind, Dimension, Space


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: for each dimension a half-open range [start, stop)."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, stops)

    def within(self, outer: Box) -> Box:
        """The same block in coordinates relative to `outer`."""
        return Box(
            tuple(start - base for start, base in zip(self.starts, outer.starts, strict=True)),
            tuple(stop - base for stop, base in zip(self.stops, outer.starts, strict=True)),
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True, order=True)
class MeshAxis:
    """An axis of the mesh that a group's devices form: the device at position P has place (P // stride) % degree."""

    degree: int
    stride: int

    def place(self, position: int) -> int:
        """Where the device at `position` of the group stands on this axis."""
        return position // self.stride % self.degree


MeshAxes = tuple[MeshAxis, ...]
"""Several axes, outer to inner."""


def mesh_of(splits: Sequence[Split], group: int) -> MeshAxes:
    """One axis for each split, outer to inner over `group` devices; those that the degrees leave over are innermost.

    The product of the degrees must divide `group`.
    """
    found = []
    stride = group
    for split in splits:
        assert stride % split.degree == 0, f"{' '.join(map(str, splits))} over {group} devices"
        stride //= split.degree
        found.append(MeshAxis(split.degree, stride))
    return tuple(found)


def merged(axes: Iterable[MeshAxis]) -> MeshAxes:
    """The one spelling of axes, outer to inner: neighbours that count on in one another are one."""
    found: list[MeshAxis] = []
    for axis in axes:
        if axis.degree == 1:
            continue
        if found and found[-1].stride == axis.stride * axis.degree:
            axis = MeshAxis(found.pop().degree * axis.degree, axis.stride)
        found.append(axis)
    return tuple(found)


def degree_of(axes: Iterable[MeshAxis]) -> int:
    """How many places axes have together."""
    return math.prod(axis.degree for axis in axes)


def members(axes: MeshAxes, position: int) -> tuple[int, ...]:
    """Positions of the devices that differ from the one at `position` along `axes` alone, in the order of the axes."""
    found = [position - sum(axis.place(position) * axis.stride for axis in axes)]
    for axis in axes:
        found = [each + place * axis.stride for each in found for place in range(axis.degree)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stage's group holds one tensor.

    `cuts[i]` are the mesh axes that cut dimension i, outer to inner. Over `sums` the devices hold shares of a sum, over
    `means` equal shares of a mean: along all other axes they hold copies. Axes are merged, so that two layouts are
    equal where they mean the same.
    """

    shape: tuple[int, ...]
    cuts: tuple[MeshAxes, ...]
    sums: MeshAxes = ()
    means: MeshAxes = ()

    @property
    def is_partial(self) -> bool:
        """Whether devices hold but shares of the value."""
        return bool(self.sums or self.means)

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of the value."""
        return not self.is_partial and not any(self.cuts)

    @property
    def partial_over(self) -> MeshAxes:
        """The axes over which devices hold shares, outer to inner."""
        return merged(sorted(self.sums + self.means, key=lambda axis: -axis.stride))

    @property
    def parts(self) -> int:
        """Into how many blocks the tensor is cut."""
        return math.prod(map(degree_of, self.cuts))

    def reduced(self) -> Layout:
        """The same blocks when shares have been added up."""
        return Layout(self.shape, self.cuts)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's block."""
        return tuple(extent // degree_of(axes) for extent, axes in zip(self.shape, self.cuts, strict=True))

    def box(self, position: int) -> Box:
        """The block that the device at `position` of the group holds."""
        starts = []
        extents = self.local_shape()
        for extent, axes in zip(extents, self.cuts, strict=True):
            index = 0
            for axis in axes:
                index = index * axis.degree + axis.place(position)
            starts.append(index * extent)
        return Box(tuple(starts), tuple(start + extent for start, extent in zip(starts, extents, strict=True)))


def replicated(shape: tuple[int, ...]) -> Layout:
    """Every device holds the whole tensor."""
    return Layout(shape, ((),) * len(shape))


def operand_layout(
    dimensions: tuple[Dimension, ...], shape: tuple[int, ...], splits: Sequence[Split], group: int
) -> Layout:
    """What a device needs of an operand, or holds of a result, under `splits` of the node's iteration space.

    A cut inside a merged dimension is a block only where `is_block` says so; callers keep to such splits.
    """
    axes = {split.axis: axis for split, axis in zip(splits, mesh_of(splits, group), strict=True)}
    return Layout(shape, tuple(merged(axes[name] for name in dimension if name in axes) for dimension in dimensions))


def result_layout(
    space: Space, dimensions: tuple[Dimension, ...], shape: tuple[int, ...], splits: Sequence[Split], group: int
) -> Layout:
    """The layout in which a node leaves a result: like an operand's, and partial over split axes that it reduces."""
    held = operand_layout(dimensions, shape, splits, group)
    present = {name for dimension in dimensions for name in dimension}
    sums: list[MeshAxis] = []
    means: list[MeshAxis] = []
    for split, axis in zip(splits, mesh_of(splits, group), strict=True):
        kind = space.axis(split.axis).kind
        if split.axis not in present and kind is not AxisKind.AGREED:
            (means if kind is AxisKind.MEAN else sums).append(axis)
    return Layout(held.shape, held.cuts, merged(sums), merged(means))


def even_degree_hint(extent: int, degree: int) -> str:
    """What would let `degree` devices share an axis of `extent` equally."""
    divisors = [count for count in range(2, min(degree, extent) + 1) if extent % count == 0]
    padded = -(-extent // degree) * degree
    others = f", or take {divisors[-1]} devices" if divisors else ""
    return f"pad it to {padded} in the model{others}"


def is_block(space: Space, axis: str, degree: int) -> bool:
    """Whether cutting `axis` leaves every device one block of each tensor: it is the outermost of its dimensions."""
    return are_blocks(space, (Split(axis, degree),))


def are_blocks(space: Space, splits: Sequence[Split]) -> bool:
    """Whether `splits` together leave every device one block of each tensor, equal to the others'.

    In a dimension made of several axes an inner one may be cut where all those outside it are cut to extent one.
    """
    degrees = {split.axis: split.degree for split in splits}
    local = {}
    for axis in space.axes:
        degree = degrees.get(axis.name, 1)
        if axis.extent % degree:
            return False
        local[axis.name] = axis.extent // degree
    return all(
        _is_one_block(dimension, local, degrees)
        for tensor in (*space.operands, *space.results)
        for dimension in tensor or ()
        if len(dimension) > 1
    )


def _is_one_block(dimension: Dimension, local: dict[str, int], degrees: dict[str, int]) -> bool:
    """Whether no axis of a dimension is cut inside of one that is not down to extent one."""
    outside = 1
    for name in dimension:
        if outside > 1 and degrees.get(name, 1) > 1:
            return False
        outside *= local[name]
    return True
