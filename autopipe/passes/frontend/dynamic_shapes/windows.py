"""Convolutions, poolings and paddings along the dimension that counts selected rows (rows whose
mask element is true).

They are supported if the mask selects the first rows. The rows after the last selected one are
filled with the element that the file's operator has there: 0 for a convolution, the smallest
element for a max pooling, the constant of a Pad.
"""

from __future__ import annotations

import math

from autopipe.ir.graph import Value
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    Indices,
    SelectedRows,
    Selection,
    row_type_of,
)
from autopipe.passes.frontend.dynamic_shapes.indices import representable_number, to_selected_rows
from autopipe.passes.frontend.dynamic_shapes.node_context import NodeContext
from autopipe.passes.frontend.dynamic_shapes.prefixes import scaled_prefix, strided_prefix

_UNSUPPORTED = (0.0, None)


def compute_windows(context: NodeContext) -> bool:
    """Write a convolution, max pooling or Pad along the dimension of rows, of which a mask selects
    the first ones. Return False for masks that select other rows, and for attributes that are not
    supported.
    """
    fact = context.fact(0)
    if not isinstance(fact, Indices | SelectedRows) or fact.selection.first_rows is None:
        return False
    if isinstance(fact, SelectedRows) and fact.pair_axis is not None:
        return False
    if any(each is not None for each in context.facts[1:]):
        return False
    rows = to_selected_rows(context.write, fact)
    is_padding = context.node.op_type == "Pad"
    fill, selection = (
        _pad_fill_and_rows(context, rows) if is_padding else _window_fill_and_rows(context, rows)
    )
    if selection is None:
        return False
    inferred: Value = context.row_axes().types[0]
    write = context.write
    result = context.node.output[0]
    filled = write.fill_unselected(write.apply_weights(rows), fill, rows.selection.axes)
    write.rewrite_node([filled.value, *context.operands[1:]], [f"{result}/rows"])
    context.results[result] = SelectedRows(
        selection, row_type_of(inferred, rows.axis), rows.axis, (0,), f"{result}/rows"
    )
    return True


def _window_fill_and_rows(
    context: NodeContext, rows: SelectedRows
) -> tuple[float, Selection | None]:
    """Return (fill, selection) of a convolution or max pooling of rows, of which a mask selects the
    first ones: the element after the last selected row, and the selection of the rows of the
    result, one per position of the window. The selection is None if attributes are not supported.
    """
    lists = {each.name: list(each.ints) for each in context.node.attribute}
    words = {each.name: each.s.decode(errors="replace") for each in context.node.attribute}
    is_pooling = context.node.op_type == "MaxPool"
    place = rows.axis - 2
    dims = len(rows.row_type.shape) - 2
    kernel = lists.get("kernel_shape", [])
    if not kernel and not is_pooling:
        kernel = [*context.types[context.operands[1]].shape[2:]]
    is_plain = (
        not context.integer("ceil_mode")
        and not lists.get("output_shape")
        and not any(context.node.output[1:])
    )
    if place < 0 or len(kernel) != dims or not is_plain:
        return _UNSUPPORTED
    stride, dilation = (lists.get(name, [1] * dims)[place] for name in ("strides", "dilations"))
    pads = lists.get("pads", [0] * 2 * dims)
    width = dilation * (kernel[place] - 1) + 1
    padding = pads[place] + pads[dims + place]
    fill = representable_number(-math.inf, rows.row_type.dtype) if is_pooling else 0.0
    is_transposed = context.node.op_type == "ConvTranspose"
    match words.get("auto_pad", "NOTSET"):
        case "SAME_UPPER" | "SAME_LOWER" if stride == 1 and not is_transposed:
            padding = width - 1
        case "VALID":
            padding = 0
        case "NOTSET" | "":
            pass
        case _:
            return _UNSUPPORTED
    if is_transposed:
        extra = lists.get("output_padding", [0] * dims)[place]
        offset = width + extra - padding - stride
        return fill, scaled_prefix(context, rows.selection, stride, offset)
    return fill, strided_prefix(context, rows.selection, stride, padding - width + 1)


def _pad_fill_and_rows(context: NodeContext, rows: SelectedRows) -> tuple[float, Selection | None]:
    """Return (fill, selection) of a Pad of rows, of which a mask selects the first ones: the
    element after the last selected row, and the selection of the rows of the result. The selection
    is None if the Pad copies rows from the end or its numbers are unknown.
    """
    arrays = {slot: context.arrays.get(name) for slot, name in enumerate(context.operands) if name}
    rank = len(rows.row_type.shape)
    named = {each.name: each for each in context.node.attribute}
    listed = next((named[name] for name in ("pads", "paddings") if name in named), None)
    pads = None if listed is None else list(listed.ints)
    pads_array = arrays.get(1)
    if pads_array is not None:
        pads = pads_array.reshape(-1).tolist()
    axes_array = arrays.get(3)
    axes = [*range(rank)]
    if axes_array is not None:
        axes = [nonnegative_axis(int(each), rank) for each in axes_array.reshape(-1)]
    if pads is None or len(pads) != 2 * len(axes) or rows.axis not in axes:
        return _UNSUPPORTED
    place = axes.index(rows.axis)
    before = pads[place]
    behind = pads[len(axes) + place]
    mode = named["mode"].s if "mode" in named else b"constant"
    fill = 0.0
    if mode != b"constant":
        if behind > 0 or (mode == b"wrap" and before > 0):
            return _UNSUPPORTED
    elif 2 in arrays:
        fill_array = arrays[2]
        if fill_array is None:
            return _UNSUPPORTED
        fill = float(fill_array.reshape(()))
    elif "value" in named:
        fill = named["value"].f
    return fill, scaled_prefix(context, rows.selection, 1, before + behind)
