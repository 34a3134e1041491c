"""Reading and writing a tensor at indices that are affine in the coordinates of the selected (true)
elements of a mask.

Exporters flatten indices: a token and its rank among the experts become `token * 2 + rank`. A
tensor that is read at such indices, for every element of the mask, is the tensor itself with its
dimensions in another order. Writing at such indices reorders the dimensions likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.domain import Indices, SelectedRows, Selection
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter

Columns = Sequence[tuple[int, ...]]
"""For each index of a multi-dimensional position, the coefficients with which it is computed from a
mask element: a constant, a factor per coordinate of the element, and a factor for its rank among
the selected elements.
"""
_NEUTRAL = {"add": 0.0, "max": -math.inf, "min": math.inf, "mul": 1.0}
"""By the reduction of a scatter, the update that changes no element."""
REDUCTIONS = frozenset({"none", *_NEUTRAL})
"""Supported values of the attribute `reduction` of scatter operators."""


def write_indices(write: RowWriter, indices: Indices) -> SelectedRows:
    """Write the integers that `indices` describes as a tensor, and return its `SelectedRows`. The
    tensor has a row per element of the mask, or, if the integers do not depend on all coordinates
    in the mask, per combination of the coordinates on which they depend.
    """
    selection = indices.selection
    dtype = indices.dtype
    over = tuple(axis for axis in selection.axes if indices.coordinate_factors(axis).any())
    count = selection.size_along(over)
    rank = len(indices.constants.shape)
    total = _write_coefficients(write, indices.constants, dtype)
    for axis in over:
        steps_shape = tuple(selection.shape[each] if each == axis else 1 for each in over)
        steps = write.reshape(write.arange(selection.shape[axis]), steps_shape)
        wide = write.expand(steps, steps_shape, [selection.shape[each] for each in over])
        coordinates = write.reshape(
            wide, [count if each == indices.axis else 1 for each in range(rank)]
        )
        factor = _write_coefficients(write, indices.coordinate_factors(axis), dtype)
        product = write.node("Mul", [write.cast(coordinates, dtype), factor])
        total = write.node("Add", [total, product])
    rows = SelectedRows(selection, indices.row_type, indices.axis, over, total)
    if not indices.rank_factors.any():
        return rows
    steps = write.arange(selection.capacity)
    ranks = write.reshape(
        write.gather_rows_of_ranks(selection, steps, (selection.capacity,), 0),
        [selection.capacity if axis == indices.axis else 1 for axis in range(rank)],
    )
    ranked = write.node(
        "Mul", [write.cast(ranks, dtype), _write_coefficients(write, indices.rank_factors, dtype)]
    )
    full = write.spread(rows, selection.axes)
    return replace(full, value=write.node("Add", [full.value, ranked]))


def to_selected_rows(write: RowWriter, fact: Indices | SelectedRows) -> SelectedRows:
    """Return `fact` as `SelectedRows`, a tensor with a row per selected element of a mask.
    `Indices` are written as a tensor.
    """
    return write_indices(write, fact) if isinstance(fact, Indices) else fact


def _write_coefficients(write: RowWriter, term: np.ndarray, dtype: DType) -> str:
    """Write a coefficient array as a constant of the type `dtype` and return its name."""
    flat = write.vector(term.reshape(-1).tolist())
    return write.cast(write.reshape(flat, term.shape), dtype)


def _mixed_radix_axes(
    column: tuple[int, ...], extent: int, selection: Selection
) -> tuple[int, ...] | None:
    """Return the axes of the mask, outermost first, whose coordinates are the digits of an index (a
    number in mixed radix).

    The index of a mask element is `constant + sum of coordinate * factor`. `column` has the
    constant, a factor per axis of the mask, and the factor of the element's rank. The digits are
    the axes whose factor is not 0. The factor of each of them must be the product of the sizes of
    the digits after it, so that the index takes consecutive values, each once. Return None if this
    does not hold, if the index depends on the rank, or if a value is outside of 0 … `extent` - 1.
    """
    constant, *factors, rank_factor = column
    if rank_factor:
        return None
    axes = sorted(
        (axis for axis in selection.axes if factors[axis]), key=lambda each: -factors[each]
    )
    step = 1
    for axis in reversed(axes):
        if factors[axis] != step:
            return None
        step *= selection.shape[axis]
    return tuple(axes) if 0 <= constant <= extent - step else None


def _axes_of_columns(
    columns: Columns, data: Value, first: int, selection: Selection
) -> list[tuple[int, ...]] | None:
    """Return, for each index of a position in `data`, the axes of the mask whose coordinates are
    its digits: the index is the number in mixed radix that these coordinates form. `columns` has
    the coefficients of the indices, which address the dimensions of `data` from `first` on. None if
    an index has no such digits, or if two indices share an axis.
    """
    found = []
    for place, column in enumerate(columns):
        axes = _mixed_radix_axes(column, data.shape[first + place], selection)
        if axes is None:
            return None
        found.append(axes)
    used = [axis for axes in found for axis in axes]
    return found if len(set(used)) == len(used) else None


def read_at_indices(
    write: RowWriter, selection: Selection, columns: Columns, data: Value, first: int
) -> tuple[str, tuple[int, ...]] | None:
    """Write the elements of `data` at one position per mask element. `columns` has, for each
    dimension of `data` from `first` on, the coefficients with which the index is computed from the
    element's coordinates. In the result, these dimensions become one, which counts rows.

    Return (name of the result, axes of the mask along which its rows differ); None if the result is
    not `data` with sliced and reordered dimensions.
    """
    axes_of_columns = _axes_of_columns(columns, data, first, selection)
    if axes_of_columns is None:
        return None
    order = [axis for axes in axes_of_columns for axis in axes]
    name = data.name
    for place, (column, axes) in enumerate(zip(columns, axes_of_columns, strict=True)):
        extent = selection.size_along(axes)
        if extent != data.shape[first + place]:
            name = write.slice(name, first + place, column[0], column[0] + extent)
    before = data.shape[:first]
    after = data.shape[first + len(columns) :]
    parts = [selection.shape[axis] for axis in order]
    divided = write.reshape(name, (*before, *parts, *after))
    inner = [first + place for place in np.argsort(order).tolist()]
    last = range(first + len(order), first + len(order) + len(after))
    reordered = write.transpose(divided, [*range(first), *inner, *last])
    result = write.reshape(reordered, (*before, math.prod(parts), *after))
    return result, tuple(sorted(order))


def are_own_ranks(indices: Indices) -> bool:
    """True if `indices` are the positions of a GatherND in which each selected row addresses
    itself. A position (the vector of indices of one read) then begins with the rank of the row
    among the selected rows; its other indices are constants.
    """
    if indices.axis or len(indices.constants.shape) < 2:
        return False
    depth = indices.constants.shape[-1]
    has_rank_first = (indices.rank_factors == ([1] + [0] * (depth - 1))).all()
    has_coordinates = any(term.any() for term in indices.terms[1:-1])
    starts_at_zero = not indices.constants[..., 0].any()
    return bool(has_rank_first) and starts_at_zero and not has_coordinates


def read_own_elements(write: RowWriter, data: SelectedRows, indices: Indices) -> str:
    """Write a GatherND that reads, from each row of `data`, elements at constant positions in the
    row, and return the result's name. Each vector of `indices` along the last dimension must begin
    with the rank of the row; the numbers after it are the position in the row.
    """
    positions = indices.constants[..., 1:]
    target = (data.shape[0], *positions.shape[1:])
    constant = write.reshape(write.vector(positions.reshape(-1).tolist()), positions.shape)
    expanded = write.expand(constant, positions.shape, target)
    return write.node("GatherND", [data.value, expanded], batch_dims=1)


def write_at_indices(
    write: RowWriter,
    rows: SelectedRows,
    columns: Columns,
    data: Value,
    first: int,
    adds: bool,
    result: str,
) -> bool:
    """Write `result`: the tensor `data` with `rows` written at, or, with `adds`, added to one
    position per mask element. `columns` has, for each dimension of `data` from `first` on, the
    coefficients with which the index is computed from the element's coordinates.

    Return False, with nothing written, unless the positions of all mask elements fill these
    dimensions.
    """
    selection = rows.selection
    axes_of_columns = _axes_of_columns(columns, data, first, selection)
    if axes_of_columns is None:
        return False
    extents = [selection.size_along(axes) for axes in axes_of_columns]
    if extents != [*data.shape[first : first + len(columns)]]:
        return False
    order = [axis for axes in axes_of_columns for axis in axes]
    before = data.shape[:first]
    after = data.shape[first + len(columns) :]
    divided = (*before, *(selection.shape[axis] for axis in order), *after)
    positions = [len(before) + place for place in np.argsort(order).tolist()]
    last = range(len(before) + len(order), len(divided))
    rows_first = [*positions, *range(len(before)), *last]
    base = write.transpose(write.reshape(data.name, divided), rows_first)
    is_written, values = _combine_updates(write, rows, tuple(sorted(order)), (*before, *after))
    zero = write.scalar(0, data.dtype)
    updates = write.node("Where", [is_written, values, zero if adds else base])
    total = write.node("Add", [base, updates]) if adds else updates
    in_order = write.transpose(total, np.argsort(rows_first).tolist())
    write.reshape(in_order, data.shape, result)
    return True


def _combine_updates(
    write: RowWriter, rows: SelectedRows, over: tuple[int, ...], rest: tuple[int, ...]
) -> tuple[str, str]:
    """Combine `rows` that are written to one position. A position is a combination of coordinates
    along the mask axes `over`. Return the names of two tensors:

    - whether a selected row (one whose mask element is true) is written to a position;
    - the sum of the selected rows that are written to a position. It is arbitrary if there is none.

    Both have the shape [positions ..., `rest` ...] or one that broadcasts to it; `rest` is the
    shape of a row.
    """
    selection = rows.selection
    ones = [1] * len(rest)
    mask, mask_shape = write.any_selected(selection, over)
    is_written = write.reshape(mask, [*(mask_shape[axis] for axis in over), *ones])
    may_collide = any(selection.shape[axis] > 1 for axis in selection.axes if axis not in over)
    if not set(rows.over) <= set(over):
        rows = write.fill_unselected(rows, 0, selection.axes)
        flat = _move_rows_first(write, rows, rest)
        return is_written, _sum_to_axes(write, flat, selection, over, rest)
    present = [selection.shape[axis] if axis in rows.over else 1 for axis in over]
    unweighted = _move_rows_first(write, replace(rows, weight=""), rest)
    values = write.reshape(unweighted, [*present, *rest])
    if not rows.weight and not may_collide:
        return is_written, values
    wide_mask = write.expand(selection.mask, selection.mask_shape, selection.shape)
    weight = write.cast(wide_mask, rows.row_type.dtype)
    if rows.weight:
        line = write.reshape(rows.weight, selection.shape_along(rows.weight_over))
        zero = write.scalar(0, rows.row_type.dtype)
        weight = write.node("Where", [wide_mask, line, zero])
    total = _sum_to_axes(write, weight, selection, over, ())
    factor = write.reshape(total, [*(selection.shape[axis] for axis in over), *ones])
    return is_written, write.node("Mul", [values, factor])


def _move_rows_first(write: RowWriter, rows: SelectedRows, rest: tuple[int, ...]) -> str:
    """Write the tensor of `rows` with the dimension that counts rows first, reshaped to [rows,
    `rest` ...]; `rest` is the shape of a row. Return the result's name.
    """
    order = [rows.axis, *(axis for axis in range(len(rows.shape)) if axis != rows.axis)]
    return write.reshape(write.transpose(rows.value, order), (rows.shape[rows.axis], *rest))


def _sum_to_axes(
    write: RowWriter,
    value: str,
    selection: Selection,
    over: Sequence[int],
    rest: tuple[int, ...],
) -> str:
    """Write the sum, along the mask axes that `over` lacks, of `value`, which has a row of shape
    `rest` per element of the mask. Return the name of the sum; its shape is [positions along `over`
    ..., `rest` ...].
    """
    others = [axis for axis in selection.axes if axis not in over]
    divided = write.reshape(value, (*selection.shape, *rest))
    total = write.sum_over(divided, others) if others else divided
    return write.reshape(total, (*(selection.shape[axis] for axis in over), *rest))


def scatter_rows(
    write: RowWriter,
    operator: str,
    data: Value,
    indices: SelectedRows,
    rows: SelectedRows,
    axis: int,
    reduction: str,
    result: str,
) -> None:
    """Write `result`: a ScatterND into `data`, or a ScatterElements along `axis`, whose indices are
    computed while running. `rows` are the updates.

    Updates of mask elements that are not selected must have no effect. With a reduction, they
    become its neutral element. Without one, a slice is appended to `data` along `axis`, these
    updates are written to it, and it is removed from the result.
    """
    selection = rows.selection
    extent = data.shape[axis]
    rows = write.spread(write.apply_weights(rows), selection.axes)
    if reduction == "none":
        indices = _redirect_unselected(write, operator, indices, extent)
        extra = write.slice(data.name, axis, 0, 1)
        target = write.node("Concat", [data.name, extra], axis=axis)
        attributes: dict[str, Any] = {}
    else:
        rows = write.fill_unselected(rows, representable_number(_NEUTRAL[reduction], data.dtype))
        indices = write.fill_unselected(indices, 0, selection.axes)
        target = data.name
        attributes = {"reduction": reduction}
    if operator == "ScatterElements":
        attributes["axis"] = axis
    operands = [target, indices.value, rows.value]
    adds_slice = reduction == "none"
    written = write.node(operator, operands, "" if adds_slice else result, **attributes)
    if adds_slice:
        write.slice(written, axis, 0, extent, result)


def representable_number(number: float, dtype: DType) -> float:
    """Return `number`, or, if it is infinite and `dtype` is an integer type, the largest or
    smallest integer of the type.
    """
    if math.isinf(number) and dtype.is_integer:
        bounds = np.iinfo(dtype.value)
        return int(bounds.max if number > 0 else bounds.min)
    return number


def _redirect_unselected(
    write: RowWriter, operator: str, indices: SelectedRows, extent: int
) -> SelectedRows:
    """Return `indices` in which rows whose mask element is false have the index `extent`, which is
    outside of the data. In a ScatterND, each row consists of several indices along the last
    dimension: the first becomes `extent`, the others become 0.
    """
    indices = write.spread(write.apply_weights(indices), indices.selection.axes)
    depth = indices.row_type.shape[-1] if operator == "ScatterND" else 1
    if depth == 1:
        return write.fill_unselected(indices, extent)
    rank = len(indices.shape)
    outside = write.reshape(write.vector([extent, *[0] * (depth - 1)]), [*[1] * (rank - 1), depth])
    mask, mask_shape = write.any_selected(indices.selection, indices.selection.axes)
    flat = write.reshape(
        write.expand(mask, mask_shape, indices.selection.shape),
        (indices.shape[indices.axis], *[1] * (rank - indices.axis - 1)),
    )
    fill = write.cast(outside, indices.row_type.dtype)
    return replace(indices, value=write.node("Where", [flat, indices.value, fill]))
