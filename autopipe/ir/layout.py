"""Who holds what of a tensor: boxes, one a device.

The same arithmetic tells what must be exchanged inside a stage, what is sent between stages with different device
groups, and what either costs, so that what is predicted is what runs.
"""

from __future__ import annotations

import enum
import math
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


class Partial(enum.Enum):
    """What the devices' copies add up to, where they are not the value itself."""

    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stage's group holds one tensor.

    `cuts[i]` lists, for dimension i, the positions in the node's splits that cut it, outer to inner; `degrees` are the
    splits' degrees, outer to inner, over the group. `partial` says that each device holds but its share of a sum or
    mean, over the splits in `partial_over`.
    """

    shape: tuple[int, ...]
    degrees: tuple[int, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()
    partial: Partial | None = None
    partial_over: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of the value."""
        return self.partial is None and not any(self.cuts)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of one device's block."""
        return tuple(
            extent // math.prod(self.degrees[cut] for cut in cuts)
            for extent, cuts in zip(self.shape, self.cuts or ((),) * len(self.shape), strict=True)
        )

    def coordinates(self, position: int, group: int) -> tuple[int, ...]:
        """Place of the device at `position` of a group of `group` devices along each split."""
        inner = group // math.prod(self.degrees)
        rest = position // inner
        places: list[int] = []
        for degree in reversed(self.degrees):
            places.append(rest % degree)
            rest //= degree
        return tuple(reversed(places))

    def box(self, position: int, group: int) -> Box:
        """The block that the device at `position` of the group holds."""
        places = self.coordinates(position, group)
        starts, stops = [], []
        for dimension, extent in enumerate(self.local_shape()):
            index = 0
            for cut in self.cuts[dimension] if self.cuts else ():
                index = index * self.degrees[cut] + places[cut]
            starts.append(index * extent)
            stops.append((index + 1) * extent)
        return Box(tuple(starts), tuple(stops))


def replicated(shape: tuple[int, ...]) -> Layout:
    """Every device holds the whole tensor."""
    return Layout(shape, (), ((),) * len(shape))


def operand_layout(
    space: Space, dimensions: tuple[Dimension, ...], shape: tuple[int, ...], splits: tuple[Split, ...]
) -> Layout:
    """What a device needs of an operand, or holds of a result, under `splits` of the node's iteration space.

    A cut inside a merged dimension is a block only where the axis is the outermost of extent above one; callers keep
    to such splits (see `is_block`). Results reduced over a split axis are partial.
    """
    axes = {split.axis: position for position, split in enumerate(splits)}
    cuts = tuple(tuple(axes[name] for name in dimension if name in axes) for dimension in dimensions)
    return Layout(shape, tuple(split.degree for split in splits), cuts)


def result_layout(
    space: Space, dimensions: tuple[Dimension, ...], shape: tuple[int, ...], splits: tuple[Split, ...]
) -> Layout:
    """The layout in which a node leaves a result: like an operand's, and partial over split axes that it reduces."""
    held = operand_layout(space, dimensions, shape, splits)
    present = {name for dimension in dimensions for name in dimension}
    over = tuple(
        position
        for position, split in enumerate(splits)
        if split.axis not in present and space.axis(split.axis).kind is not AxisKind.AGREED
    )
    if not over:
        return held
    kinds = {space.axis(splits[position].axis).kind for position in over}
    partial = Partial.MEAN if kinds == {AxisKind.MEAN} else Partial.SUM
    return Layout(held.shape, held.degrees, held.cuts, partial, over)


def plain(layout: Layout) -> Layout:
    """The one spelling of a layout: whole tensors carry no splits."""
    return replicated(layout.shape) if layout.is_whole else layout


def even_degree_hint(extent: int, degree: int) -> str:
    """What would let `degree` devices share an axis of `extent` equally."""
    divisors = [count for count in range(2, min(degree, extent) + 1) if extent % count == 0]
    padded = -(-extent // degree) * degree
    others = f", or take {divisors[-1]} devices" if divisors else ""
    return f"pad it to {padded} in the model{others}"


def is_block(space: Space, axis: str, degree: int) -> bool:
    """Whether cutting `axis` leaves every device one block of each tensor: it is the outermost of its dimensions."""
    extent = space.axis(axis).extent
    if extent % degree:
        return False
    extents = space.extents()
    for tensor in (*space.operands, *space.results):
        for dimension in tensor or ():
            if axis in dimension and any(extents[name] > 1 for name in dimension[: dimension.index(axis)]):
                return False
    return True
