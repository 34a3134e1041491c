"""Laws (functions that write a node with static shapes) of Gather, GatherND, Slice and Split whose
operands have a row per selected element of a mask.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    WITNESS,
    CountedNumbers,
    Indices,
    SelectedRows,
    Selection,
)
from autopipe.passes.frontend.dynamic_shapes.indices import (
    are_own_ranks,
    read_at_indices,
    read_own_elements,
    to_selected_rows,
)
from autopipe.passes.frontend.dynamic_shapes.node_context import NodeContext
from autopipe.passes.frontend.dynamic_shapes.prefixes import limit_selection, slice_prefix
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter
from autopipe.passes.frontend.dynamic_shapes.sizes import Number, SizeArray


def gather_own_elements(context: NodeContext) -> bool:
    """Write a GatherND in which each selected row (a row whose mask element is true) reads elements
    of itself. A position, the vector of indices of one read, then begins with the rank of the row
    among the selected rows; its other indices are constants. Return False, and write nothing, for
    another GatherND.
    """
    data = context.fact(0)
    indices = context.fact(1)
    if not isinstance(data, SelectedRows) or not isinstance(indices, Indices):
        return False
    if context.integer("batch_dims"):
        return False
    if data.axis or not are_own_ranks(indices):
        return False
    data = context.write.apply_weights(data)
    value = read_own_elements(context.write, data, indices)
    shape = indices.constants.shape
    row_type = replace(data.row_type, shape=(*shape[:-1], *data.row_type.shape[shape[-1] :]))
    context.results[context.node.output[0]] = replace(data, row_type=row_type, value=value)
    return True


def gather_by_rank(context: NodeContext) -> bool:
    """Write a Gather or GatherND of whole selected rows (rows whose mask element is true), whose
    indices are ranks among the selected rows. It moves the selected rows to the front and gathers
    from them. Return False, and write nothing, if the node reads along another dimension than that
    of the rows.
    """
    write = context.write
    is_nd = context.node.op_type == "GatherND"
    result = context.node.output[0]
    data = context.fact(0)
    positions = context.fact(1)
    if not isinstance(data, Indices | SelectedRows) or isinstance(positions, CountedNumbers):
        return False
    depth = _index_depth(context, data, positions)
    if depth is None or (data.axis >= depth if is_nd else data.axis != depth):
        return False
    rows = to_selected_rows(write, data)
    packed = write.pack(rows)
    index_type = context.types[context.operands[1]] if positions is None else positions.row_type
    name = context.operands[1]
    indices = None
    if positions is not None:
        indices = to_selected_rows(write, positions)
        indices = write.fill_unselected(indices, 0, indices.selection.axes)
        name = indices.value
    column = data.axis if is_nd else None
    name = write_nonnegative_ranks(context, name, rows.selection, index_type, column)
    if indices is None:
        write.rewrite_node([packed.name, name], [result])
        return True
    value = f"{result}/rows"
    write.rewrite_node([packed.name, name], [value])
    outer = () if is_nd else packed.shape[:depth]
    inner = packed.shape[depth if is_nd else depth + 1 :]
    found = index_type.shape[:-1] if is_nd else index_type.shape
    row_type = Value("", packed.dtype, (*outer, *found, *inner))
    context.results[result] = SelectedRows(
        indices.selection, row_type, len(outer) + indices.axis, indices.over, value
    )
    return True


def _index_depth(
    context: NodeContext, data: Indices | SelectedRows, positions: Indices | SelectedRows | None
) -> int | None:
    """Return the axis along which a Gather reads. For a GatherND, return the length of a position
    (the vector of indices of one read).

    None for a GatherND that is not supported: it has batch_dims, or `positions` counts rows along
    its last dimension, so that the indices of one position are in several rows.
    """
    if context.node.op_type == "Gather":
        return nonnegative_axis(context.integer("axis"), len(data.row_type.shape))
    if context.integer("batch_dims"):
        return None
    if positions is None:
        shape = context.types[context.operands[1]].shape
        return shape[-1] if shape else None
    rank = len(positions.row_type.shape)
    return None if positions.axis == rank - 1 else positions.row_type.shape[-1]


def write_nonnegative_ranks(
    context: NodeContext, name: str, selection: Selection, index_type: Value, column: int | None
) -> str:
    """Write the ranks `name`, of type `index_type`, with n added to negative ones, which count from
    the last row; n is the number of rows that `selection` selects. Return the result's name, or
    `name` if its elements are known not to be negative.

    In a GatherND, one read has several indices, along the last dimension of `name`; `column` is the
    index along this dimension at which the rank is. In a Gather, all elements are ranks, and
    `column` is None.
    """
    write = context.write
    known = context.arrays.get(name)
    if known is not None and (known >= 0).all():
        return name
    count = write.cast(write.count_selected(selection), index_type.dtype)
    if column is not None:
        flags = [int(each == column) for each in range(index_type.shape[-1])]
        count = write.node("Mul", [count, write.cast(write.vector(flags), index_type.dtype)])
    is_negative = write.node("Less", [name, write.scalar(0, index_type.dtype)])
    return write.node("Where", [is_negative, write.node("Add", [name, count]), name])


def gather_from_static(context: NodeContext) -> bool:
    """Write a Gather or GatherND that reads a static value at indices that are affine in the
    coordinates of selected mask elements: it becomes slices and a transpose of that value. Return
    False if this is not possible.
    """
    indices = context.fact(1)
    if not isinstance(indices, Indices) or context.fact(0) is not None:
        return False
    is_nd = context.node.op_type == "GatherND"
    data = context.types[context.operands[0]]
    shape = indices.constants.shape
    outer = shape[:-1] if is_nd else shape
    columns = None if context.integer("batch_dims") else indices.index_columns(is_nd)
    first = 0 if is_nd else nonnegative_axis(context.integer("axis"), len(data.shape))
    if columns is None or math.prod(outer) != 1:
        return False
    found = read_at_indices(context.write, indices.selection, columns, data, first)
    if found is None:
        return False
    name, over = found
    row_shape = (*data.shape[:first], *outer, *data.shape[first + len(columns) :])
    rows = SelectedRows(
        indices.selection, Value("", data.dtype, row_shape), first + indices.axis, over, name
    )
    if len(outer) > 1:
        rows = replace(rows, value=context.write.reshape(name, rows.shape))
    context.results[context.node.output[0]] = rows
    return True


def slice_rows(context: NodeContext) -> bool:
    """Write a Slice along the dimension that counts selected rows (rows whose mask element is
    true). Its start must be constant, its end constant or relative to the last row; the result has
    another mask.

    Return False for a Slice along other dimensions, and for one that keeps all rows. Raises
    ModelError if start, axis or step depends on the number of selected rows.
    """
    fact = context.fact(0)
    write = context.write
    if not isinstance(fact, Indices | SelectedRows):
        return False
    starts, ends, axes, steps = (context.operand_number(slot) for slot in (1, 2, 3, 4))
    if starts is None or ends is None or starts.shape != (1,):
        return False
    if isinstance(axes, SizeArray) or isinstance(steps, SizeArray):
        raise context.unsupported_error()
    step = 1 if steps is None else int(steps.reshape(-1)[0])
    is_prefix = fact.selection.first_rows is not None
    if step < 1 or (step > 1 and not is_prefix):
        return False
    axis = (
        0 if axes is None else nonnegative_axis(int(axes.reshape(-1)[0]), len(fact.row_type.shape))
    )
    if axis != fact.axis:
        return False
    if isinstance(starts, SizeArray):
        raise context.unsupported_error()
    start = int(starts[0])
    end = _slice_end(context, ends, fact.selection.capacity)
    if start == 0 and end is None and step == 1:
        return False
    rows = to_selected_rows(write, fact)
    if slice_prefix(context, rows, start, end, step):
        return True
    if step > 1:
        raise context.unsupported_error()
    selection = rows.selection
    result = context.node.output[0]
    if start == 0 and end is not None and 0 < end < selection.capacity:
        packed = write.pack(rows)
        first = limit_selection(context, selection, end)
        value = write.slice(packed.name, axis, 0, end)
        context.results[result] = SelectedRows(first, rows.row_type, axis, first.axes, value)
        return True
    ranks = write.ranks(selection)
    mask = write.flat_mask(selection)
    count = write.count_selected(selection)
    if start:
        is_before = write.node("Less", [ranks, _write_slice_bound(write, start, count)])
        mask = write.node("And", [mask, write.node("Not", [is_before])])
    if end is not None:
        is_behind = write.node("GreaterOrEqual", [ranks, _write_slice_bound(write, end, count)])
        mask = write.node("And", [mask, write.node("Not", [is_behind])])
    root = f"{selection.key} {start} {end}"
    context.results[result] = _restrict_rows(context, rows, mask, root)
    return True


def _slice_end(context: NodeContext, ends: Number, capacity: int) -> int | None:
    """Return the end of a Slice of n rows, n <= `capacity`. A negative end counts from the last
    row; None means that the last row is included. Raises ModelError for an end that is neither
    constant nor n plus a constant.
    """
    if isinstance(ends, np.ndarray):
        end = int(ends.reshape(-1)[0])
        return None if end >= max(WITNESS, capacity) else end
    assert isinstance(ends, SizeArray)
    offset, *factors = ends.elements()[0]
    if factors != [1]:
        raise context.unsupported_error()
    return None if offset >= 0 else int(offset)


def _write_slice_bound(write: RowWriter, bound: int, count: str) -> str:
    """Return the name of a bound of a Slice: `bound`, plus the value `count`, the number of rows,
    if `bound` is negative.
    """
    number = write.scalar(bound, DType.INT64)
    return write.node("Add", [count, number]) if bound < 0 else number


def split_rows(context: NodeContext) -> bool:
    """Write a Split along the dimension that counts selected rows (rows whose mask element is
    true), into parts whose lengths can be computed while running. Each result has a mask for the
    ranks of its part.

    Return False for a Split along another dimension, without an operand for the lengths, or with
    lengths that depend on the number of selected rows.
    """
    fact = context.fact(0)
    write = context.write
    if not isinstance(fact, Indices | SelectedRows) or len(context.operands) < 2:
        return False
    axis = nonnegative_axis(context.integer("axis"), len(fact.row_type.shape))
    if fact.axis != axis or context.fact(1) is not None:
        return False
    rows = to_selected_rows(write, fact)
    selection = rows.selection
    ranks = write.ranks(selection)
    ends = write.node("CumSum", [context.operands[1], write.scalar(0, DType.INT64)])
    rest = write.flat_mask(selection)
    for place, name in enumerate(context.node.output):
        is_before_end = write.node("Less", [ranks, write.slice(ends, 0, place, place + 1)])
        mask = write.node("And", [rest, is_before_end])
        rest = write.node("And", [rest, write.node("Not", [is_before_end])])
        root = f"{selection.key} {context.operands[1]} {place}"
        context.results[name] = _restrict_rows(context, rows, mask, root)
    return True


def _restrict_rows(context: NodeContext, rows: SelectedRows, mask: str, root: str) -> SelectedRows:
    """Return `rows` with fewer selected rows: those for which the boolean vector `mask` is true.
    The vector has one element per element of the mask that selects `rows`, and must be false for
    elements that this mask does not select. `root` is a name for the sequence of elements of the
    new mask.
    """
    write = context.write
    shape = rows.selection.shape
    selection = Selection(write.reshape(mask, shape), shape, shape, context.title, root)
    full = write.spread(write.apply_weights(rows), rows.selection.axes)
    return replace(full, selection=selection)
