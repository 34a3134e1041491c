"""Facts: what the frontend records of a value whose shape or elements depend on a selection (the
true elements of a boolean mask).

Below, n is the number of selected elements. From the most to the least precise fact, each of which
can be converted to the next:

    static            no fact is recorded: the shape does not depend on the data
    CountedNumbers    numbers that are polynomials in n
    Indices           integers with a row per selected element, affine in that element's coordinates
    SelectedRows      any tensor with a row per selected element
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.sizes import SizeArray

WITNESS = 1_000_003
"""The value of n, the number of selected rows, that is assumed for shape inference and for tracing
the dimension of rows through a node. It is a prime larger than usual sizes, so that no other size
and no product of sizes is mistaken for n. Of the results, only the sizes of the other dimensions
and the index of the dimension with size n are used.
"""


@dataclass(frozen=True, slots=True)
class PrefixLength:
    """The number of rows that a mask selects if it selects the first rows of a vector. It is `scale
    * count + offset`; `scale` and `offset` are constants, `count` is computed while running.
    """

    count: str
    """Name of the int64 scalar in the graph that is multiplied by `scale`."""
    root: str
    """The root of the mask that selects `count` rows: a name for the sequence of its elements."""
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The true elements of a boolean mask, in row-major order. Their number is called n."""

    mask: str
    """Name of the mask in the graph."""
    mask_shape: tuple[int, ...]
    """The mask's shape in the graph. It is 1 along the axes over which the mask is broadcast."""
    shape: tuple[int, ...]
    """The shape to which the mask is broadcast."""
    node: str = field(compare=False)
    """Operator and name of the node that selects, for messages. Selections of several nodes can be
    equal.
    """
    root: str = field(default="", compare=False)
    """A name for the sequence of the mask's elements in row-major order. Two masks with an equal
    name have equal elements, although their shapes may differ. "" if only the mask itself
    identifies the elements.
    """
    prefix: PrefixLength | None = field(default=None, compare=False)
    """The number of selected rows, if the mask selects the first rows along its first axis;
    otherwise None.
    """

    @property
    def first_rows(self) -> PrefixLength | None:
        """The number of selected elements, if the mask has one dimension and selects its first
        elements; otherwise None.
        """
        return self.prefix if len(self.shape) == 1 else None

    @property
    def key(self) -> tuple[str, tuple[tuple[bool, int], ...]]:
        """An identifier of the selected elements and their order. Masks that differ only in how
        their elements are divided into dimensions have equal keys.
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
        """The indices of all axes of the mask."""
        return tuple(range(len(self.shape)))

    @property
    def capacity(self) -> int:
        """Number of elements of the broadcast mask, the maximum of n."""
        return math.prod(self.shape)

    def size_along(self, axes: Sequence[int]) -> int:
        """Return the product of the mask's sizes along `axes`."""
        return math.prod(self.shape[axis] for axis in axes)

    def shape_along(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the broadcast mask, with 1 for each axis that is not in `axes`."""
        return tuple(extent if axis in axes else 1 for axis, extent in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class CountedNumbers:
    """The fact (what is recorded of a value) of numbers that depend on the data only through n, the
    number of elements that `selection` selects.
    """

    selection: Selection
    numbers: SizeArray


@dataclass(frozen=True, slots=True)
class Indices:
    """The fact (what is recorded of a value) of integers with a row per selected element of a mask.
    The row of an element with coordinates c in the mask, and rank r among the selected elements, is
    `terms[0] + sum over a of c[a] * terms[1 + a] + r * terms[-1]`.
    """

    selection: Selection
    dtype: DType
    axis: int
    """The dimension of the value that counts rows."""
    terms: tuple[np.ndarray, ...]
    """Coefficients: arrays of the value's shape with size 1 along `axis`."""

    @property
    def row_type(self) -> Value:
        """Type of one row: the value's type with size 1 along `axis`."""
        return Value("", self.dtype, self.terms[0].shape)

    @property
    def constants(self) -> np.ndarray:
        """The first term of each row: the numbers that depend neither on coordinates in the mask
        nor on the rank.
        """
        return self.terms[0]

    @property
    def rank_factors(self) -> np.ndarray:
        """The last term: the factors of an element's rank among the selected elements."""
        return self.terms[-1]

    def coordinate_factors(self, axis: int) -> np.ndarray:
        """Return the factors of the coordinate along `axis` of the mask."""
        return self.terms[1 + axis]

    def index_columns(self, per_column: bool) -> tuple[tuple[int, ...], ...] | None:
        """Return, for each column of the value, a tuple: its constant, its factor for each
        coordinate in the mask, and its factor for the rank. A column is all entries at one index
        along the last dimension, or, without `per_column`, all entries.

        None if entries of one column differ, or if `per_column` is true and the last dimension
        counts rows.
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
    """The fact (what is recorded of a value) of a tensor with a row per selected element of a mask.
    The graph stores a row per element of the mask, selected or not, or fewer if rows are equal
    along axes of the mask. Rows of elements that are not selected are arbitrary.
    """

    selection: Selection
    row_type: Value
    """Type of one row: size 1 along `axis`. Along `pair_axis`, the size is the capacity of the
    selection.
    """
    axis: int
    """The dimension of the value that counts rows."""
    over: tuple[int, ...]
    """Axes of the mask along which rows can differ. `value` has a row per combination of
    coordinates along these axes.
    """
    value: str
    """Name of the stored tensor in the graph."""
    weight: str = ""
    """Name of a vector with which the rows are still to be multiplied; "" if there is none."""
    weight_over: tuple[int, ...] = ()
    """Axes of the mask along which weights can differ. The vector `weight` has an element per
    combination of coordinates along these axes.
    """
    pair_axis: int | None = None
    """A second dimension that counts the rows of this selection, as in attention scores of all
    selected rows with all selected rows; None if there is none.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `value`, the tensor that the graph stores."""
        return replace_size(self.row_type.shape, self.axis, self.selection.size_along(self.over))

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The dimensions that count rows: `axis`, and `pair_axis` if it is not None."""
        return (self.axis,) if self.pair_axis is None else (self.axis, self.pair_axis)


Fact = CountedNumbers | Indices | SelectedRows


def replace_size(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """Return `shape` with the size `extent` along `axis`."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def row_type_of(value: Value, axis: int) -> Value:
    """Return the type of one row of a value whose dimension `axis` counts rows: its size along
    `axis` becomes 1.
    """
    return Value("", value.dtype, replace_size(value.shape, axis, 1))


def witness_type(fact: Fact) -> Value:
    """Return the type that a value with this fact has in the ONNX file if the number of rows
    selected by data is `WITNESS`. A fact is what is recorded of a value whose shape or elements
    depend on data.
    """
    if isinstance(fact, CountedNumbers):
        return Value("", DType.INT64, fact.numbers.shape)
    shape = fact.row_type.shape
    for axis in row_axes_of(fact):
        shape = replace_size(shape, axis, WITNESS)
    return replace(fact.row_type, shape=shape)


def row_axes_of(fact: Fact | None) -> tuple[int, ...]:
    """Return the dimensions of a value that count rows selected by data. `fact` is what is recorded
    of the value, None for a static value. The result is () without a fact and for `CountedNumbers`.
    """
    if isinstance(fact, Indices):
        return (fact.axis,)
    return fact.row_axes if isinstance(fact, SelectedRows) else ()


def have_counted_size(types: Sequence[Value]) -> bool:
    """True if `types` have a size that depends on the number of rows selected by data. They were
    inferred as if this number were `WITNESS`, so such a size is a nonzero multiple of `WITNESS`.
    """
    return any(extent and extent % WITNESS == 0 for value in types for extent in value.shape)
