"""Configurations of a node: the executable ways to split its iteration space over a group of
devices (Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021, section
II). The iteration space has one axis per loop of the operator.

Also the layouts in which a node needs its operands and produces its results, for all its
configurations at once. Few distinct layouts occur, so they are stored once, and integer arrays map
each configuration to its layout.
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
"""One configuration of a node: its splits, ordered from outer to inner over the devices of a group;
() if each device computes the full node.
"""


def configurations(space: Space, group: int, outermost: str | None = None) -> tuple[Splits, ...]:
    """Return all configurations of `space` that `group` devices can execute, by ascending number of
    splits. The first configuration is (), no split.

    The degree of a split divides the size of its axis, and the product of the degrees divides
    `group`. Axes of kind UNSPLITTABLE are not split. If the axis `outermost` is split, its split is
    the outermost one; callers pass the sample axis, or None if there is none. The other axes follow
    in the order of the space, so that equal degrees of neighbouring nodes use the same devices.
    Some tensor dimensions merge several axes. Splits that would give a device several separate
    ranges of such a dimension are excluded (`ir.layout.is_one_range`).
    """
    axes = sorted(space.axes, key=lambda axis: axis.name != outermost)
    candidates = _all_splits(
        [axis for axis in axes if axis.kind is not AxisKind.UNSPLITTABLE and axis.size > 1], group
    )
    sizes = space.axis_sizes()
    merged = merged_dimensions(space)
    if merged:
        degrees = ({split.axis: split.degree for split in splits} for splits in candidates)
        are_contiguous = [
            all(is_one_range(dimension, sizes, each) for dimension in merged) for each in degrees
        ]
        candidates = [
            splits
            for splits, is_contiguous in zip(candidates, are_contiguous, strict=True)
            if is_contiguous
        ]
    return tuple(sorted(candidates, key=len))


def _all_splits(axes: Sequence[Axis], group: int) -> list[Splits]:
    """Return all ways to split `axes` evenly whose product of degrees divides `group`. The splits
    of each way are in the order of `axes`.
    """
    divisors = [count for count in range(1, group + 1) if group % count == 0]
    # Ways to split the axes that were already visited, by number of devices. The loop visits axes
    # from inner to outer, so that it adds each split in front of the splits inside of it.
    by_devices: dict[int, list[Splits]] = {devices: [()] for devices in divisors}
    for axis in reversed(axes):
        split_by_degree = {
            degree: (Split(axis.name, degree),) if degree > 1 else () for degree in divisors
        }
        degrees = [degree for degree in divisors if axis.size % degree == 0]
        by_devices = {
            devices: [
                (*split_by_degree[degree], *inner)
                for degree in degrees
                if devices % degree == 0
                for inner in by_devices[devices // degree]
            ]
            for devices in divisors
        }
    return by_devices[group]


Integers = NDArray[np.int64]

_Item = TypeVar("_Item", bound=Hashable)


def index_distinct(items: Iterable[_Item]) -> tuple[list[_Item], Integers]:
    """Return (distinct items, indices): the distinct items in order of first occurrence, and for
    each of `items` its index among them.
    """
    index_of_item: dict[_Item, int] = {}
    indices = [index_of_item.setdefault(item, len(index_of_item)) for item in items]
    return list(index_of_item), np.array(indices, dtype=np.int64)


def index_distinct_codes(codes: Integers) -> tuple[Integers, Integers]:
    """Return (distinct codes, indices): the distinct codes in ascending order, and for each of
    `codes` its index among them. Codes are non-negative integers; time and memory grow with the
    largest code.
    """
    present = np.zeros(int(codes.max(initial=0)) + 1, dtype=bool)
    present[codes] = True
    numbers = np.cumsum(present) - 1
    return np.flatnonzero(present), numbers[codes]


def index_distinct_rows(
    columns: Sequence[tuple[Sequence[Any], Integers]], rows: int
) -> tuple[list[tuple[Any, ...]], Integers]:
    """Return (distinct rows, indices) of a table with `rows` rows: its distinct rows in order of
    first occurrence, and for each row its index among them.

    Each column is a pair (items, indices): row r of the table contains items[indices[r]]. Without
    columns there is one distinct row, ().
    """
    codes = np.zeros(rows, dtype=np.int64)
    count = 1
    for items, indices in columns:
        present, codes = index_distinct_codes(codes * len(items) + indices)
        count = len(present)
    firsts = np.empty(count, dtype=np.int64)
    firsts[codes[::-1]] = np.arange(rows)[::-1]
    order = np.argsort(firsts)
    renumbered = np.empty(count, dtype=np.int64)
    renumbered[order] = np.arange(count)
    picked = [
        [items[number] for number in indices[firsts[order]].tolist()] for items, indices in columns
    ]
    return list(zip(*picked, strict=True)) if columns else [()], renumbered[codes]


class MeshPositions:
    """The mesh axis that belongs to each split axis in each of several configurations, on a group
    of `group` devices (`ir.layout.mesh_axes_of`).

    Arrays are indexed by the position of a configuration in the sequence passed to the constructor.
    """

    def __init__(self, configurations: Sequence[Splits], group: int) -> None:
        self.configurations = len(configurations)
        configurations_of_axis: dict[str, list[int]] = defaultdict(list)
        codes: dict[str, list[int]] = defaultdict(list)
        for configuration, splits in enumerate(configurations):
            stride = group
            for split in splits:
                stride //= split.degree
                configurations_of_axis[split.axis].append(configuration)
                codes[split.axis].append(split.degree * (group + 1) + stride)
        self._mesh_axes: dict[str, tuple[list[MeshAxis | None], Integers]] = {}
        """By name of a split axis: its distinct mesh axes, the first of which is None (not split),
        and for each configuration the index of its mesh axis among them.
        """
        for name, split_in in configurations_of_axis.items():
            index = np.zeros(len(configurations), dtype=np.int64)
            distinct_codes, numbers = index_distinct_codes(np.array(codes[name], dtype=np.int64))
            index[split_in] = numbers + 1
            self._mesh_axes[name] = (
                [None, *(MeshAxis(*divmod(mark, group + 1)) for mark in distinct_codes.tolist())],
                index,
            )

    def degrees(self, axes: Iterable[str]) -> Integers:
        """Return, for each configuration, the product of the degrees of `axes`; an axis that is not
        split has degree 1.
        """
        found = np.ones(self.configurations, dtype=np.int64)
        for name in axes:
            if name in self._mesh_axes:
                mesh_axes, index = self._mesh_axes[name]
                found *= np.array([1 if each is None else each.degree for each in mesh_axes])[index]
        return found

    @property
    def degree(self) -> Integers:
        """The product of all degrees of each configuration, of shape [configurations]."""
        return self.degrees(self._mesh_axes)

    def layouts(self, names: Iterable[str], make: Callable[[dict[str, MeshAxis]], Layout]) -> _Part:
        """Return (distinct layouts, indices): the distinct layouts of a tensor over all
        configurations, and for each configuration the index of its layout.

        `make` is called with the mesh axes, by name and from outer to inner, of those axes of
        `names` that a configuration splits. It returns the layout for them.
        """
        split_names = [name for name in dict.fromkeys(names) if name in self._mesh_axes]
        rows, row_of = index_distinct_rows(
            [self._mesh_axes[name] for name in split_names], self.configurations
        )
        found = []
        for row in rows:
            split = [
                (name, axis)
                for name, axis in zip(split_names, row, strict=True)
                if axis is not None
            ]
            found.append(make(dict(sorted(split, key=lambda pair: -pair[1].stride))))
        layouts, layout_of_row = index_distinct(found)
        return layouts, layout_of_row[row_of]


_Part = tuple[list[Layout], Integers]
"""(distinct layouts, indices) of one dimension of a tensor, or of its partial sums: for each
configuration, the index of its layout among the distinct layouts.

The sharding of one dimension does not depend on the other dimensions. So the layouts of a tensor
are combinations of the layouts of its dimensions and of its partial sums.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayouts:
    """The layouts of one tensor under all configurations of a node."""

    layouts: tuple[Layout, ...]
    layout_of: Integers
    """For each configuration, the index of its layout in `layouts`."""
    elements: Integers
    """For each of `layouts`, the number of elements of one device's shard."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutTable:
    """Cache of the layouts of nodes' tensors on `group` devices.

    The mesh axes that shard a tensor do not depend on its sizes, unless the node reads it through
    windows. So tensors that are sharded equally share one computation. Tuples of configurations are
    compared by identity, so callers pass one object for equal tuples.
    """

    group: int
    _positions: dict[int, tuple[tuple[Splits, ...], MeshPositions]] = field(default_factory=dict)
    """By id of a tuple of configurations: the tuple and its mesh positions. Storing the tuple keeps
    its id valid.
    """
    _known: dict[Hashable, TensorLayouts] = field(default_factory=dict)

    def mesh_positions_of(self, configurations: tuple[Splits, ...]) -> MeshPositions:
        """Return the mesh axes of `configurations` on the group; computed once per tuple."""
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
        """Return the layouts in which a node with iteration space `space` needs its operand at
        `position`, of shape `shape`, under each of `configurations`.
        """
        dimensions = space.operands[position] or ()
        windows = space.windows_of(position)
        sharding = id(configurations), dimensions, windows, shape if windows else ()
        positions = self.mesh_positions_of(configurations)
        return self._layouts(
            sharding,
            shape,
            positions,
            lambda: _dimension_layouts(positions, dimensions, shape, windows),
        )

    def result(
        self,
        space: Space,
        position: int,
        shape: tuple[int, ...],
        configurations: tuple[Splits, ...],
    ) -> TensorLayouts:
        """Return the layouts in which a node with iteration space `space` produces its result at
        `position`, of shape `shape`, under each of `configurations`. A layout states whether the
        result is a partial sum or mean.
        """
        dimensions = space.results[position] or ()
        kinds = tuple((axis.name, axis.kind) for axis in space.axes)
        positions = self.mesh_positions_of(configurations)

        def layout_parts() -> list[_Part]:
            result_axes = {name for dimension in dimensions for name in dimension}
            reduced = [name for name, _ in kinds if name not in result_axes]
            partial_sums = positions.layouts(
                reduced, lambda axes: result_layout(space, (), (), axes)
            )
            return [*_dimension_layouts(positions, dimensions, shape), partial_sums]

        return self._layouts(
            (id(configurations), dimensions, kinds), shape, positions, layout_parts
        )

    def _layouts(
        self,
        sharding: Hashable,
        shape: tuple[int, ...],
        positions: MeshPositions,
        parts: Callable[[], list[_Part]],
    ) -> TensorLayouts:
        """Return the layouts of a tensor of `shape`, and cache them. `sharding` is a key of all
        that determines the sharding; `parts` is called once per key, and returns the layouts of the
        dimensions and of the partial sums.
        """
        key = sharding, shape
        if key not in self._known:
            if sharding not in self._known:
                self._known[sharding] = _combined_layouts(shape, parts(), positions.configurations)
            tensor = self._known[sharding]
            if tensor.layouts[0].shape != shape:
                layouts = (
                    Layout(shape, each.shard_axes, each.sums, each.means) for each in tensor.layouts
                )
                elements = (
                    tensor.elements * math.prod(shape) // max(1, math.prod(tensor.layouts[0].shape))
                )
                tensor = TensorLayouts(tuple(layouts), tensor.layout_of, elements)
            self._known[key] = tensor
        return self._known[key]


def _dimension_layouts(
    positions: MeshPositions,
    dimensions: Sequence[Dimension],
    shape: Sequence[int],
    windows: Sequence[Windowed] = (),
) -> list[_Part]:
    """Return, for each dimension of a tensor of `shape`, its distinct layouts and the layout of
    each configuration. `dimensions` are the axes that index each dimension, and `windows` the
    windows through which a node reads the tensor.
    """
    found = []
    for position, (dimension, size) in enumerate(zip(dimensions, shape, strict=True)):
        own_windows = tuple(
            replace(each, dimension=0) for each in windows if each.dimension == position
        )
        names = [*dimension, *(each.axis for each in own_windows)]
        found.append(
            positions.layouts(
                names, partial(operand_layout, (dimension,), (size,), windows=own_windows)
            )
        )
    return found


def _combined_layouts(
    shape: tuple[int, ...], parts: Sequence[_Part], configurations: int
) -> TensorLayouts:
    """Return the layouts of a tensor of `shape` under each of `configurations` configurations.

    `parts` contains the layouts of each of its dimensions. An additional last entry contains its
    partial sums, if the tensor can be partial.
    """
    rows, layout_of = index_distinct_rows(parts, configurations)
    local = {id(each): each.local_elements for part_layouts, _ in parts for each in part_layouts}
    elements = np.array(
        [math.prod(local[id(each)] for each in row) for row in rows], dtype=np.int64
    )
    layouts = []
    for row in rows:
        dimensions = row[: len(shape)]
        partial_sums = row[len(shape) :]
        shard_axes = tuple(each.shard_axes[0] for each in dimensions)
        windows = tuple(each.windows[0] if each.windows else None for each in dimensions)
        if any(windows):
            fill = next((each.fill for each in dimensions if each.fill), 0.0)
            layouts.append(Layout(shape, shard_axes, windows=windows, fill=fill))
        else:
            sums, means = (
                (partial_sums[0].sums, partial_sums[0].means) if partial_sums else ((), ())
            )
            layouts.append(Layout(shape, shard_axes, sums, means))
    return TensorLayouts(tuple(layouts), layout_of, elements)
