"""The abstract domain: what is recorded of a value whose shape or elements depend on a selection.

From the most to the least precise fact, each of which can be converted to the next:

    static          no fact is recorded: the shape does not depend on the data
    Counted         numbers that are polynomials in n, the number of selected rows
    Indices         integers with a row per selected element, affine in that element's coordinates
    SelectedRows    any tensor with a row per selected element
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.sizes import SizeArray

WITNESS = 1_000_003
"""The value of n for which shape inference runs and axes are followed. It is a prime larger than
usual sizes, so that no other axis and no product of sizes is taken for the rows. Only the sizes of
dimensions that do not count rows, and the position of the dimension that does, are used.
"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The number of leading rows that a selection has: `scale * count + offset`."""

    count: str
    """Name of an int64 scalar in the graph."""
    root: str
    """The root of the selection that has `count` rows."""
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The true elements of a boolean mask, in row-major order; n is their number."""

    mask: str
    """Name of the mask in the graph."""
    mask_shape: tuple[int, ...]
    """The mask's shape in the graph: 1 along the axes over which the mask is broadcast."""
    shape: tuple[int, ...]
    """The shape to which the mask is broadcast."""
    node: str = field(compare=False)
    """The operator that selects, for messages. Selections of several nodes can be equal."""
    root: str = field(default="", compare=False)
    """The name of the mask's elements in row-major order, whatever their dimensions."""
    prefix: Prefix | None = field(default=None, compare=False)
    """The number of selected rows, if the selection is the first rows along the mask's first axis.
    """

    @property
    def first_rows(self) -> Prefix | None:
        """The number of selected elements, if the selection is the first elements of a vector."""
        return self.prefix if len(self.shape) == 1 else None

    @property
    def key(self) -> tuple[str, tuple[tuple[bool, int], ...]]:
        """The selected elements in order. Masks that differ only in how their elements are divided
        into dimensions have equal keys.
        """
        parts: list[tuple[bool, int]] = []
        for stored, extent in zip(self.mask_shape, self.shape, strict=True):
            varies = stored == extent
            if extent > 1 and parts and parts[-1][0] == varies:
                parts[-1] = (varies, parts[-1][1] * extent)
            elif extent > 1:
                parts.append((varies, extent))
        return self.root or self.mask, tuple(parts)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    @property
    def capacity(self) -> int:
        """Number of elements of the mask, the maximum of n."""
        return math.prod(self.shape)

    def extent(self, axes: Sequence[int]) -> int:
        """Return the product of the sizes of some of the mask's axes."""
        return math.prod(self.shape[axis] for axis in axes)

    def masked_shape(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the mask's shape with 1 for every axis that is not in `axes`."""
        return tuple(extent if axis in axes else 1 for axis, extent in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Counted:
    """Numbers that depend on the data only through n, the number of elements of `selection`."""

    selection: Selection
    numbers: SizeArray


@dataclass(frozen=True, slots=True)
class Indices:
    """Integers with a row per selected element. The row of an element with coordinates c and rank r
    among the selected elements is `terms[0] + sum over a of c[a] * terms[1 + a] + r * terms[-1]`.
    """

    selection: Selection
    dtype: DType
    axis: int
    """The dimension that counts rows."""
    terms: tuple[np.ndarray, ...]
    """Coefficients: arrays of the value's shape with extent 1 along `axis`."""

    @property
    def row_type(self) -> Value:
        """Type of one row: the value's type with extent 1 along `axis`."""
        return Value("", self.dtype, self.terms[0].shape)

    @property
    def constants(self) -> np.ndarray:
        return self.terms[0]

    @property
    def rank_factors(self) -> np.ndarray:
        return self.terms[-1]

    def coordinate_factors(self, axis: int) -> np.ndarray:
        """Return the coefficients of the coordinate along an axis of the mask."""
        return self.terms[1 + axis]

    def index_columns(self, per_column: bool) -> tuple[tuple[int, ...], ...] | None:
        """Return the terms of each column, if all rows are equal; otherwise None.

        A column is an entry along the last dimension. Without `per_column`, all entries must be
        equal, and the result has one column.
        """
        shape = self.terms[0].shape
        if per_column and self.axis == len(shape) - 1:
            return None
        flat = [term.reshape(-1, term.shape[-1] if per_column else 1) for term in self.terms]
        if any((term != term[:1]).any() for term in flat):
            return None
        return tuple(zip(*(term[0].tolist() for term in flat), strict=True))


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """A tensor with a row per selected element, stored with a row per element of the mask. Stored
    rows of elements that are not selected are arbitrary.
    """

    selection: Selection
    row_type: Value
    """Type of one row: extent 1 along `axis`. Along `pair_axis` the extent is the capacity."""
    axis: int
    """The dimension that counts rows."""
    over: tuple[int, ...]
    """Axes of the mask along which rows can differ. `value` has a row per element along them."""
    value: str
    """Name of the stored tensor in the graph."""
    weight: str = ""
    """Name of a vector that the rows are still to be multiplied with; "" if there is none."""
    weight_over: tuple[int, ...] = ()
    """Axes of the mask along which weights can differ."""
    pair_axis: int | None = None
    """A second dimension that counts the rows of the same selection, as in the attention scores of
    all rows with all rows.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `value`."""
        return with_extent(self.row_type.shape, self.axis, self.selection.extent(self.over))

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The dimensions that count rows."""
        return (self.axis,) if self.pair_axis is None else (self.axis, self.pair_axis)


Fact = Counted | Indices | SelectedRows


def with_extent(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """Return a shape with another extent along one axis."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def row_type_of(value: Value, axis: int) -> Value:
    """Return the type of one row of a value whose rows are counted by dimension `axis`."""
    return Value("", value.dtype, with_extent(value.shape, axis, 1))


def witness_type(fact: Fact) -> Value:
    """Return the value's type in the file for n = WITNESS."""
    if isinstance(fact, Counted):
        return Value("", DType.INT64, fact.numbers.shape)
    shape = fact.row_type.shape
    for axis in row_axes_of(fact):
        shape = with_extent(shape, axis, WITNESS)
    return replace(fact.row_type, shape=shape)


def row_axes_of(fact: Fact | None) -> tuple[int, ...]:
    """Return the dimensions of a value that count rows."""
    if isinstance(fact, Indices):
        return (fact.axis,)
    return fact.row_axes if isinstance(fact, SelectedRows) else ()


def depends_on_size(types: Sequence[Value]) -> bool:
    """True if a shape that was inferred for n = WITNESS depends on n."""
    return any(extent and extent % WITNESS == 0 for value in types for extent in value.shape)
