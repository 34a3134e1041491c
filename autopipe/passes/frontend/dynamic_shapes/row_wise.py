"""Laws (functions that write a node with static shapes) of operators that compute each selected row
separately, and of operators that are linear in indices. A row is selected if its element of a mask
is true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopipe.ir.graph import Value
from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Indices,
    SelectedRows,
    replace_size,
    row_type_of,
)
from autopipe.passes.frontend.dynamic_shapes.indices import to_selected_rows
from autopipe.passes.frontend.dynamic_shapes.masked_reductions import (
    fill_pairs,
    replace_counted_operands,
)
from autopipe.passes.frontend.dynamic_shapes.node_context import SHAPE_OPERANDS, NodeContext
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter
from autopipe.passes.frontend.inference import RANDOM

_SUMS = frozenset({"Add", "Concat", "Sub"})
"""Operators whose constant operands are added to, or joined with, the constant term of `Indices`
only. For the other terms they count as zeros.
"""
_INTEGER_TYPES = (6, 7)
"""ONNX's numbers of the element types int32 and int64, the types of indices."""
_SAFE_ELEMENTS = {
    (name, slot): element for name, row in OPERATORS.items() for slot, element in row.finite_at
}
"""By (operator, operand index), an element for which result and gradient are finite.

It replaces elements of rows that are not selected, which can be outside of the operator's domain.
Without this, their gradient, zero times infinity, would be NaN.
"""
_KEEP_WEIGHTS = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators f with f(weight · row) = weight · f(row), before which rows need not be multiplied by
their weights.
"""


def compute_indices(context: NodeContext) -> bool:
    """Apply an operator to `Indices`, integers with a row per selected mask element that are affine
    in its coordinates: evaluate the operator on each term, and write no node. Return False if the
    result is not known to be affine.
    """
    operator = context.node.op_type
    numbers = context.operand_numbers_for(1)
    indices = [each for each in context.facts if isinstance(each, Indices)]
    unknown = [
        name for name, each in zip(context.operands, numbers, strict=True) if name and each is None
    ]
    if len(unknown) > len(indices) or (operator == "Mul" and len(indices) > 1):
        return False
    if operator == "Cast" and context.integer("to") not in _INTEGER_TYPES:
        return False
    sizes = SHAPE_OPERANDS.get(operator, ())
    if any(
        isinstance(each, CountedNumbers) and slot not in sizes
        for slot, each in enumerate(context.facts)
    ):
        return False
    types, axes, pair_axes, _ = context.row_axes()
    if axes is None or pair_axes:
        return False
    results = []
    for term in range(len(indices[0].terms)):
        arrays: list[np.ndarray | None] = []
        for array, each in zip(numbers, context.facts, strict=True):
            if isinstance(each, Indices):
                arrays.append(each.terms[term])
            elif array is not None and operator in _SUMS and term > 0:
                arrays.append(np.zeros_like(array))
            else:
                arrays.append(array)
        found = context.evaluate_row(arrays, types)
        if found is None:
            return False
        results.append(found)
    columns = zip(context.node.output, types, axes, *results, strict=True)
    for name, type_, axis, *terms in columns:
        context.results[name] = Indices(indices[0].selection, type_.dtype, axis, tuple(terms))
    return True


def compute_rows(context: NodeContext) -> bool:
    """Write an operator that computes each selected row (a row whose mask element is true)
    separately. It computes all rows that the graph stores, selected or not. Return False if a
    result combines several rows.
    """
    write = context.write
    operator = context.node.op_type
    types, axes, pair_axes, reduced_axes = context.row_axes()
    if axes is None:
        return False
    rows = {
        slot: to_selected_rows(write, each)
        for slot, each in enumerate(context.facts)
        if isinstance(each, Indices | SelectedRows)
    }
    if (
        operator == "Mul"
        and not pair_axes
        and _record_weighted_product(context, types[0], axes[0], rows)
    ):
        return True
    keeps_weights = operator in _KEEP_WEIGHTS and len(rows) == 1
    over = _common_axes(rows, keeps_weights)
    if operator in RANDOM or pair_axes:
        over = next(iter(rows.values())).selection.axes
    for slot, each in rows.items():
        rows[slot] = each if keeps_weights else write.spread(write.apply_weights(each), over)
        needs_safe = (operator, slot) in _SAFE_ELEMENTS and not _is_integer_power(context)
        if needs_safe and not isinstance(context.facts[slot], Indices):
            rows[slot] = _fill_with_safe_element(write, rows[slot], _SAFE_ELEMENTS[operator, slot])
    if reduced_axes:
        rows.update(fill_pairs(context, rows, reduced_axes))
    names = [
        rows[slot].value if slot in rows else name for slot, name in enumerate(context.operands)
    ]
    first = next(iter(rows.values()))
    selection = first.selection
    replace_counted_operands(context, names, selection.size_along(first.over))
    write.rewrite_node(names, [f"{name}/rows" if name else "" for name in context.node.output])
    weight = first.weight if keeps_weights else ""
    if weight and operator == "Cast":
        weight = write.cast(weight, types[0].dtype)
    pairs = pair_axes or (None,) * len(types)
    present = filter(None, context.node.output)
    for name, type_, axis, pair_axis in zip(present, types, axes, pairs, strict=True):
        row_type = row_type_of(type_, axis)
        if pair_axis is not None:
            shape = replace_size(row_type.shape, pair_axis, selection.capacity)
            row_type = replace(row_type, shape=shape)
        context.results[name] = SelectedRows(
            selection,
            row_type,
            axis,
            first.over,
            f"{name}/rows",
            weight,
            first.weight_over if weight else (),
            pair_axis,
        )
    return True


def _common_axes(rows: Mapping[int, SelectedRows], keeps_weights: bool) -> tuple[int, ...]:
    """Return the axes of the mask along which rows of any operand differ. Rows can have weights,
    with which they are still to be multiplied; axes along which weights differ are included unless
    `keeps_weights`.
    """
    axes: set[int] = set()
    for each in rows.values():
        axes.update(each.over)
        if not keeps_weights:
            axes.update(each.weight_over)
    return tuple(sorted(axes))


def _fill_with_safe_element(write: RowWriter, rows: SelectedRows, number: float) -> SelectedRows:
    """Return the rows with `number`, for which result and gradient of an operator are finite, where
    the mask that selects the rows is false, along both dimensions of rows if there are two.
    """
    filled = write.fill_unselected(rows, number)
    return filled if rows.pair_axis is None else write.fill_unselected_pairs(filled, number)


def _is_integer_power(context: NodeContext) -> bool:
    """True for a Pow whose exponents are known positive integers: result and gradient are finite
    for every finite base.
    """
    exponent = context.operand_number(1) if context.node.op_type == "Pow" else None
    if not isinstance(exponent, np.ndarray):
        return False
    return bool(((exponent >= 1) & (exponent == np.floor(exponent))).all())


def _record_weighted_product(
    context: NodeContext, result_type: Value, axis: int, rows: Mapping[int, SelectedRows]
) -> bool:
    """Record the product of rows with one number per row as weighted rows: rows with a vector of
    weights with which they are still to be multiplied. This requires that the numbers differ along
    an axis of the mask along which the rows are equal. Return False for another product.

    Rows are multiplied by their weights only when an operator needs it, so the graph stores fewer
    rows until then.
    """
    if len(rows) < 2:
        return False
    for data, factor in ((rows[0], rows[1]), (rows[1], rows[0])):
        is_scalar = math.prod(factor.row_type.shape) == 1
        has_result_shape = data.row_type.shape == replace_size(result_type.shape, axis, 1)
        adds_axes = not set(factor.over) <= set(data.over)
        if is_scalar and has_result_shape and adds_axes and not factor.weight and not data.weight:
            count = factor.selection.size_along(factor.over)
            weight = context.write.reshape(factor.value, (count,))
            context.results[context.node.output[0]] = replace(
                data,
                row_type=row_type_of(result_type, axis),
                axis=axis,
                weight=weight,
                weight_over=factor.over,
            )
            return True
    return False
