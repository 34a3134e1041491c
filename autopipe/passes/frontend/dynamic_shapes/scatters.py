"""Laws (functions that write a node with static shapes) of Scatter, ScatterElements and ScatterND
whose indices, updates or target have a row per selected (true) element of a mask.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopipe.ir.graph import Value
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Fact,
    Indices,
    SelectedRows,
    replace_size,
)
from autopipe.passes.frontend.dynamic_shapes.gathers import write_nonnegative_ranks
from autopipe.passes.frontend.dynamic_shapes.indices import (
    REDUCTIONS,
    are_own_ranks,
    scatter_rows,
    to_selected_rows,
    write_at_indices,
)
from autopipe.passes.frontend.dynamic_shapes.node_context import NodeContext
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter


def scatter(context: NodeContext) -> bool:
    """Write a scatter whose indices, updates or target have a row per selected (true) element of a
    mask. If the target has these rows, return False for a scatter along another dimension than that
    of the rows. Raises ModelError if the reduction is not supported, or if neither target nor
    indices have rows.
    """
    operator = context.node.op_type
    target = context.fact(0)
    indices = context.fact(1)
    stated = (each.s for each in context.node.attribute if each.name == "reduction")
    reduction = next(stated, b"none").decode(errors="replace")
    if isinstance(target, Indices | SelectedRows):
        rank = len(target.row_type.shape)
        axis = 0 if operator == "ScatterND" else nonnegative_axis(context.integer("axis"), rank)
        return target.axis == axis and _scatter_into_rows(context, target, reduction)
    if not isinstance(indices, Indices | SelectedRows) or reduction not in REDUCTIONS:
        raise context.unsupported_error()
    data = context.types[context.operands[0]]
    _scatter_into_static(context, data, indices, reduction, context.node.output[0])
    return True


def _scatter_into_rows(
    context: NodeContext, target: Indices | SelectedRows, reduction: str
) -> bool:
    """Write updates into `target`, which has a row per selected (true) element of a mask. The
    indices are ranks of rows among the selected rows. Return True; raises ModelError for
    unsupported operands.
    """
    write = context.write
    indices = context.fact(1)
    result = context.node.output[0]
    rows = to_selected_rows(write, target)
    if isinstance(indices, CountedNumbers) or reduction not in REDUCTIONS:
        raise context.unsupported_error()
    if indices is None and context.fact(2) is not None:
        raise context.unsupported_error()
    is_nd = context.node.op_type == "ScatterND"
    if is_nd and isinstance(indices, Indices) and are_own_ranks(indices):
        positions = _write_own_positions(write, indices)
        full = write.spread(write.apply_weights(rows), rows.selection.axes)
        updates = write.apply_weights(_update_rows(context, indices))
        updates = write.spread(updates, rows.selection.axes)
        attributes = {"reduction": reduction} if reduction != "none" else {}
        operands = [full.value, positions, updates.value]
        value = write.node("ScatterND", operands, f"{result}/rows", **attributes)
        context.results[result] = replace(full, value=value)
        return True
    packed = write.pack(rows)
    written = Value(f"{result}/packed", packed.dtype, packed.shape)
    column = 0 if is_nd else None
    if indices is None:
        index_type = context.types[context.operands[1]]
        positions = write_nonnegative_ranks(
            context, context.operands[1], rows.selection, index_type, column
        )
        write.rewrite_node([packed.name, positions, context.operands[2]], [written.name])
    else:
        index_rows = to_selected_rows(write, indices)
        if isinstance(indices, SelectedRows):
            index_rows = write.apply_weights(index_rows)
        positions = write_nonnegative_ranks(
            context, index_rows.value, rows.selection, index_rows.row_type, column
        )
        index_rows = replace(index_rows, value=positions)
        _scatter_into_static(context, packed, index_rows, reduction, written.name)
    context.results[result] = write.unpack(rows.selection, written, rows.axis)
    return True


def _write_own_positions(write: RowWriter, indices: Indices) -> str:
    """Write the positions of a ScatterND in which each row updates itself, for every element of the
    mask: the number of the element, followed by the constant indices. Return the result's name.
    """
    count = indices.selection.capacity
    constants = indices.constants
    rank = len(constants.shape)
    numbers = write.reshape(write.arange(count), (count, *[1] * (rank - 1)))
    others = constants[..., 1:]
    rest = write.reshape(write.vector(others.reshape(-1).tolist()), others.shape)
    inner = constants.shape[1:-1]
    parts = [
        write.expand(numbers, (count, *[1] * (rank - 1)), (count, *inner, 1)),
        write.expand(rest, (1, *inner, others.shape[-1]), (count, *inner, others.shape[-1])),
    ]
    return write.node("Concat", parts, axis=-1) if others.shape[-1] else parts[0]


def _scatter_into_static(
    context: NodeContext,
    data: Value,
    indices: Indices | SelectedRows,
    reduction: str,
    result: str,
) -> None:
    """Write `result`: the tensor `data` with updates at `indices`, which have a row per selected
    (true) element of a mask. The updates are written by reordering dimensions if possible,
    otherwise by a scatter.
    """
    write = context.write
    rows = _update_rows(context, indices)
    operator = "ScatterND" if context.node.op_type == "ScatterND" else "ScatterElements"
    is_nd = operator == "ScatterND"
    axis = 0 if is_nd else nonnegative_axis(context.integer("axis"), len(data.shape))
    columns = _index_columns(indices, is_nd, data, axis) if reduction in ("none", "add") else None
    if columns is not None:
        around = (*data.shape[:axis], *data.shape[axis + len(columns) :])
        fits = math.prod(rows.row_type.shape) == math.prod(around)
        adds = reduction == "add"
        if fits and write_at_indices(write, rows, columns, data, axis, adds, result):
            return
    index_rows = to_selected_rows(write, indices)
    scatter_rows(write, operator, data, index_rows, rows, axis, reduction, result)


def _index_columns(
    indices: Indices | SelectedRows, is_nd: bool, data: Value, axis: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return the coefficients of each index of a position (see `Indices.index_columns`) if a
    position addresses a whole slice of `data`; None otherwise, and if the indices are not
    `Indices`.
    """
    if not isinstance(indices, Indices):
        return None
    if is_nd:
        return indices.index_columns(per_column=True)
    shape = indices.constants.shape
    rest = [extent for place, extent in enumerate(shape) if place != indices.axis]
    others = [extent for place, extent in enumerate(data.shape) if place != axis]
    is_slices = indices.axis == axis and rest == others
    return indices.index_columns(per_column=False) if is_slices else None


def _update_rows(context: NodeContext, indices: Indices | SelectedRows) -> SelectedRows:
    """Return the updates of the scatter as rows that the mask of its `indices` selects. If the
    updates are static, row r belongs to the true mask element of rank r, which is the number of
    true elements before it. Raises ModelError if the updates are numbers that depend on the count
    of rows.
    """
    fact: Fact | None = context.fact(2)
    if isinstance(fact, CountedNumbers):
        raise context.unsupported_error()
    if fact is not None:
        return to_selected_rows(context.write, fact)
    updates = context.types[context.operands[2]]
    axis = indices.axis
    name = context.write.gather_rows_of_ranks(
        indices.selection, context.operands[2], updates.shape, axis
    )
    row_type = Value("", updates.dtype, replace_size(updates.shape, axis, 1))
    return SelectedRows(indices.selection, row_type, axis, indices.selection.axes, name)
