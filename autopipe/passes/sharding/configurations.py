"""The configurations of a node: every executable way to share its iteration space among a group
(PaSE, section II).

And the layouts in which they read its operands and leave its results, for all configurations at
once: different things are told apart by small numbers, and arrays say which of them each
configuration has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import (
    Layout,
    MeshAxis,
    is_one_range,
    merged_dimensions,
    operand_layout,
    result_layout,
)
from autopipe.ir.placement import Split
from autopipe.ir.space import Axis, AxisKind, Dimension, Space, Windowed

Splits = tuple[Split, ...]
"""One configuration of a node: splits outer to inner over the group's devices; () where all compute
it whole.
"""


def configurations(space: Space, group: int, outermost: str | None = None) -> tuple[Splits, ...]:
    """All splits of `space` that `group` devices can execute, the first of them none. Degrees
    divide extents, their product divides `group`, and no axis is split that must stay whole. The
    axis `outermost`, where samples are counted, is split outside of all others, which keep the
    order of the space: so equal degrees of neighbours fall on the same devices. Of dimensions that
    several axes make up each device has one block.
    """
    axes = sorted(space.axes, key=lambda axis: axis.name != outermost)
    found = _splits_of(
        [axis for axis in axes if axis.kind is not AxisKind.UNSPLITTABLE and axis.size > 1], group
    )
    extents = space.axis_sizes()
    mixed = merged_dimensions(space)
    if mixed:
        degrees = ({split.axis: split.degree for split in splits} for splits in found)
        blocks = [
            all(is_one_range(dimension, extents, each) for dimension in mixed) for each in degrees
        ]
        found = [splits for splits, is_block in zip(found, blocks, strict=True) if is_block]
    return tuple(sorted(found, key=len))


def _splits_of(axes: Sequence[Axis], group: int) -> list[Splits]:
    """Every way to split `axes`, in order, whose degrees' product divides `group`."""
    divisors = [count for count in range(1, group + 1) if group % count == 0]
    # Of the axes so far, innermost first: the ways to split them for each number of devices left.
    known: dict[int, list[Splits]] = {left: [()] for left in divisors}
    for axis in reversed(axes):
        own = {degree: (Split(axis.name, degree),) if degree > 1 else () for degree in divisors}
        degrees = [degree for degree in divisors if axis.size % degree == 0]
        known = {
            left: [
                (*own[degree], *inner)
                for degree in degrees
                if left % degree == 0
                for inner in known[left // degree]
            ]
            for left in divisors
        }
    return known[group]


Integers = NDArray[np.int64]

_Item = TypeVar("_Item", bound=Hashable)


def numbered(items: Iterable[_Item]) -> tuple[list[_Item], Integers]:
    """The different ones of `items`, in order, and which of them each one is."""
    known: dict[_Item, int] = {}
    of = [known.setdefault(item, len(known)) for item in items]
    return list(known), np.array(of, dtype=np.int64)


def distinct(codes: Integers) -> tuple[Integers, Integers]:
    """The different ones of small numbers, ascending, and which of them each one is."""
    present = np.zeros(int(codes.max(initial=0)) + 1, dtype=bool)
    present[codes] = True
    numbers = np.cumsum(present) - 1
    return np.flatnonzero(present), numbers[codes]


def combined(
    columns: Sequence[tuple[Sequence[Any], Integers]], rows: int
) -> tuple[list[tuple[Any, ...]], Integers]:
    """The different rows of columns, in order, and which of them each of the `rows` equals. Of a
    column its items are given, and the number of each row's item.
    """
    codes = np.zeros(rows, dtype=np.int64)
    count = 1
    for items, of in columns:
        known, codes = distinct(codes * len(items) + of)
        count = len(known)
    firsts = np.empty(count, dtype=np.int64)
    firsts[codes[::-1]] = np.arange(rows)[::-1]
    order = np.argsort(firsts)
    renumbered = np.empty(count, dtype=np.int64)
    renumbered[order] = np.arange(count)
    picked = [[items[number] for number in of[firsts[order]].tolist()] for items, of in columns]
    return list(zip(*picked, strict=True)) if columns else [()], renumbered[codes]


class MeshPositions:
    """Where axes lie on the mesh of `group` devices, of those that any of the configurations
    splits, outer to inner (`ir.layout.mesh_axes_of`).
    """

    def __init__(self, configurations: Sequence[Splits], group: int) -> None:
        self.configurations = len(configurations)
        rows: dict[str, list[int]] = defaultdict(list)
        marks: dict[str, list[int]] = defaultdict(list)
        for row, splits in enumerate(configurations):
            stride = group
            for split in splits:
                stride //= split.degree
                rows[split.axis].append(row)
                marks[split.axis].append(split.degree * (group + 1) + stride)
        self._places: dict[str, tuple[list[MeshAxis | None], Integers]] = {}
        """Of each axis the different places, the first of them nowhere, and which of them each
        configuration has.
        """
        for name, where in rows.items():
            of = np.zeros(len(configurations), dtype=np.int64)
            known, numbers = distinct(np.array(marks[name], dtype=np.int64))
            of[where] = numbers + 1
            self._places[name] = (
                [None, *(MeshAxis(*divmod(mark, group + 1)) for mark in known.tolist())],
                of,
            )

    def degrees(self, axes: Iterable[str]) -> Integers:
        """Into how many parts `axes` are cut together, [configurations]."""
        found = np.ones(self.configurations, dtype=np.int64)
        for name in axes:
            if name in self._places:
                places, of = self._places[name]
                found *= np.array([1 if each is None else each.degree for each in places])[of]
        return found

    @property
    def degree(self) -> Integers:
        return self.degrees(self._places)

    def layouts(self, names: Iterable[str], make: Callable[[dict[str, MeshAxis]], Layout]) -> _Part:
        """The layouts that `make` gives, which depend on where the axes `names` lie; it takes them
        outer to inner.
        """
        own = [name for name in dict.fromkeys(names) if name in self._places]
        rows, of = combined([self._places[name] for name in own], self.configurations)
        found = []
        for row in rows:
            split = [(name, axis) for name, axis in zip(own, row, strict=True) if axis is not None]
            found.append(make(dict(sorted(split, key=lambda pair: -pair[1].stride))))
        known, number = numbered(found)
        return known, number[of]


_Part = tuple[list[Layout], Integers]
"""The different layouts of one dimension alone, or of no dimension with shares; and which each
configuration has. How a dimension is cut does not depend on the others, so that a tensor's layouts
are put together from few parts.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayouts:
    """One tensor under each configuration of a node: few different layouts, and which of them each
    one has.
    """

    layouts: tuple[Layout, ...]
    of: Integers
    elements: Integers
    """Of one device's block of each layout."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutTable:
    """The layouts of nodes' tensors on `group` devices. But for windows how a tensor is cut does
    not depend on its extents: those cut equally are worked out once. Equal configurations are to be
    the same object.
    """

    group: int
    _positions: dict[int, tuple[tuple[Splits, ...], MeshPositions]] = field(default_factory=dict)
    """Configurations, held so that their place stays their own, and where axes lie in them."""
    _known: dict[Hashable, TensorLayouts] = field(default_factory=dict)

    def mesh_positions_of(self, configurations: tuple[Splits, ...]) -> MeshPositions:
        if id(configurations) not in self._positions:
            self._positions[id(configurations)] = (
                configurations,
                MeshPositions(configurations, self.group),
            )
        return self._positions[id(configurations)][1]

    def operand(
        self,
        space: Space,
        position: int,
        shape: tuple[int, ...],
        configurations: tuple[Splits, ...],
    ) -> TensorLayouts:
        """How a node of `space` reads its operand at `position`."""
        dimensions = space.operands[position] or ()
        windows = space.windows_of(position)
        cut = id(configurations), dimensions, windows, shape if windows else ()
        positions = self.mesh_positions_of(configurations)
        return self._layouts(
            cut, shape, positions, lambda: _parts(positions, dimensions, shape, windows)
        )

    def result(
        self,
        space: Space,
        position: int,
        shape: tuple[int, ...],
        configurations: tuple[Splits, ...],
    ) -> TensorLayouts:
        """How a node of `space` leaves its result at `position`, shares of sums and means
        included.
        """
        dimensions = space.results[position] or ()
        kinds = tuple((axis.name, axis.kind) for axis in space.axes)
        positions = self.mesh_positions_of(configurations)

        def parts() -> list[_Part]:
            present = {name for dimension in dimensions for name in dimension}
            reduced = [name for name, _ in kinds if name not in present]
            shares = positions.layouts(reduced, lambda axes: result_layout(space, (), (), axes))
            return [*_parts(positions, dimensions, shape), shares]

        return self._layouts((id(configurations), dimensions, kinds), shape, positions, parts)

    def _layouts(
        self,
        cut: Hashable,
        shape: tuple[int, ...],
        positions: MeshPositions,
        parts: Callable[[], list[_Part]],
    ) -> TensorLayouts:
        """The layouts of a tensor of `shape`; tensors with one `cut` are worked out once."""
        key = cut, shape
        if key not in self._known:
            if cut not in self._known:
                self._known[cut] = _together(shape, parts(), positions.configurations)
            found = self._known[cut]
            if found.layouts[0].shape != shape:
                layouts = (
                    Layout(shape, each.shard_axes, each.sums, each.means) for each in found.layouts
                )
                elements = (
                    found.elements * math.prod(shape) // max(1, math.prod(found.layouts[0].shape))
                )
                found = TensorLayouts(tuple(layouts), found.of, elements)
            self._known[key] = found
        return self._known[key]


def _parts(
    positions: MeshPositions,
    dimensions: Sequence[Dimension],
    shape: Sequence[int],
    windows: Sequence[Windowed] = (),
) -> list[_Part]:
    found = []
    for place, (dimension, extent) in enumerate(zip(dimensions, shape, strict=True)):
        own = tuple(replace(each, dimension=0) for each in windows if each.dimension == place)
        names = [*dimension, *(each.axis for each in own)]
        found.append(
            positions.layouts(names, partial(operand_layout, (dimension,), (extent,), windows=own))
        )
    return found


def _together(shape: tuple[int, ...], parts: Sequence[_Part], configurations: int) -> TensorLayouts:
    """The layouts of a tensor whose dimensions, and then whose shares if it has any, are
    `parts`.
    """
    rows, of = combined(parts, configurations)
    local = {id(each): each.local_elements for known, _ in parts for each in known}
    elements = np.array(
        [math.prod(local[id(each)] for each in row) for row in rows], dtype=np.int64
    )
    layouts = []
    for row in rows:
        cut = row[: len(shape)]
        shares = row[len(shape) :]
        cuts = tuple(each.shard_axes[0] for each in cut)
        windows = tuple(each.windows[0] if each.windows else None for each in cut)
        if any(windows):
            fill = next((each.fill for each in cut if each.fill), 0.0)
            layouts.append(Layout(shape, cuts, windows=windows, fill=fill))
        else:
            sums, means = (shares[0].sums, shares[0].means) if shares else ((), ())
            layouts.append(Layout(shape, cuts, sums, means))
    return TensorLayouts(tuple(layouts), of, elements)
