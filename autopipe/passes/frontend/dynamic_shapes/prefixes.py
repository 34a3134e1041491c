"""Selections (true elements of boolean masks) that consist of the first rows of a vector, whose
number is computed while running.

The number of rows of such a selection can be `scale * count + offset`. Convolutions and slices of
its rows give further selections of first rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    PrefixLength,
    SelectedRows,
    Selection,
)
from autopipe.passes.frontend.dynamic_shapes.node_context import NodeContext
from autopipe.passes.frontend.dynamic_shapes.sizes import SizeArray


def bounded_prefix(
    context: NodeContext, limit: str, root: str, maximum: int, factor: int
) -> Selection:
    """Return the selection (the true elements of a mask) of the first `limit` of `maximum` rows.
    `root` is a name for the sequence of the mask's elements.

    The scalar `limit` is rounded up to an integer, which must be a multiple of `factor`. The
    program stops if the number is larger than `maximum`.
    """
    write = context.write
    result = context.node.output[0]
    dtype = context.types[limit].dtype
    scalar = write.reshape(limit, ())
    checked = write.node("Bounded", [scalar], domain="autopipe", most=maximum, title=f"{result}:0")
    rounded = write.node("Ceil", [checked]) if dtype.is_floating else checked
    count = write.cast(rounded, DType.INT64)
    if factor == 1 or maximum < factor:
        return _new_prefix(context, root, PrefixLength(count, root), maximum)
    quotient = write.node("Div", [count, write.scalar(factor, DType.INT64)])
    prefix = PrefixLength(quotient, f"{root} / {factor}", factor)
    context.derived_selections[root] = _prefix_selection(
        context, prefix, maximum // factor * factor
    )
    return context.derived_selections[root]


def make_limit_fact(context: NodeContext, selection: Selection, limit: Value) -> CountedNumbers:
    """Return what is recorded of a value of type `limit`: its elements are the number of rows of
    `selection`, whose mask selects first rows.
    """
    dtype = np.float64 if limit.dtype.is_floating else np.int64
    base, scale, offset = express_by_base_selection(context, selection)
    return CountedNumbers(base, SizeArray.affine(limit.shape, scale, offset, dtype))


def express_by_base_selection(
    context: NodeContext, selection: Selection
) -> tuple[Selection, int, int]:
    """Return (base, scale, offset) for a selection, the true elements of a mask: it has `scale * n
    + offset` rows, where n is the number of rows of the selection `base`.

    If `selection` consists of first rows and their number is recorded as `scale * count + offset`,
    `base` consists of the first `count` rows. Quotients of sizes are then exact. Otherwise `base`
    is `selection` itself, with scale 1 and offset 0.
    """
    prefix = selection.first_rows
    if prefix is None or (prefix.scale, prefix.offset) == (1, 0):
        return selection, 1, 0
    capacity = (selection.shape[0] - prefix.offset) // prefix.scale
    base = _prefix_selection(context, replace(prefix, scale=1, offset=0), capacity)
    context.derived_selections.setdefault((base.key, prefix.scale, prefix.offset), selection)
    return base, prefix.scale, prefix.offset


def scaled_prefix(context: NodeContext, selection: Selection, scale: int, offset: int) -> Selection:
    """Return the selection (the true elements of a mask) of the first `scale * n + offset` rows,
    where n is the number of rows of `selection`, which must consist of first rows.
    """
    prefix = selection.first_rows
    assert prefix is not None
    scaled = replace(prefix, scale=prefix.scale * scale, offset=prefix.offset * scale + offset)
    found = _prefix_selection(context, scaled, selection.shape[0] * scale + offset)
    context.derived_selections.setdefault((selection.key, scale, offset), found)
    return found


def strided_prefix(
    context: NodeContext, selection: Selection, stride: int, offset: int
) -> Selection:
    """Return the selection of the first (n + offset - 1) // stride + 1 rows, where n is the number
    of rows of `selection`, which must consist of first rows. This is the number of positions of a
    window that can begin at each of n + offset rows and moves by `stride`.
    """
    if stride == 1:
        return scaled_prefix(context, selection, 1, offset)
    write = context.write
    prefix = selection.first_rows
    root = f"{selection.root!r} by {stride} from {offset}"
    assert prefix is not None
    capacity = (selection.shape[0] + offset - 1) // stride + 1
    if prefix.scale % stride == 0:
        scaled = replace(
            prefix,
            scale=prefix.scale // stride,
            offset=(prefix.offset + offset - 1) // stride + 1,
        )
        return _prefix_selection(context, scaled, capacity)
    if root in context.derived_selections:
        return context.derived_selections[root]
    numbers = (prefix.scale, prefix.offset + offset - 1 + stride, stride)
    scale, added, step = (write.scalar(each, DType.INT64) for each in numbers)
    total = write.node("Add", [write.node("Mul", [prefix.count, scale]), added])
    count = write.node("Div", [total, step])
    return _new_prefix(context, root, PrefixLength(count, root), capacity)


def limit_selection(context: NodeContext, selection: Selection, maximum: int) -> Selection:
    """Return the selection (the true elements of a mask) of the first min(n, `maximum`) of
    `maximum` rows, where n is the number of elements of `selection`.
    """
    root = limited_root(selection, maximum)
    if root in context.derived_selections:
        return context.derived_selections[root]
    count = context.write.count_selected(selection)
    return _new_prefix(context, root, PrefixLength(count, root), maximum)


def limited_root(selection: Selection, maximum: int) -> str:
    """Return the name under which the selection of the first min(n, `maximum`) rows is recorded,
    where n is the number of elements of `selection`.
    """
    return f"{selection.key}, at most {maximum}"


def slice_prefix(
    context: NodeContext, rows: SelectedRows, start: int, end: int | None, step: int
) -> bool:
    """Write a Slice of rows of which a mask selects the first ones. The Slice takes every `step`-th
    row from row `start` on. It ends with the last selected row if `end` is None; otherwise `end` is
    negative and counts from that row. Return False, and write nothing, for other masks and bounds.
    """
    if rows.selection.first_rows is None or start < 0 or (end is not None and end >= 0):
        return False
    removed = end or 0
    selection = strided_prefix(context, rows.selection, step, removed - start)
    write = context.write
    rows = write.spread(write.apply_weights(rows), rows.selection.axes)
    capacity = rows.shape[rows.axis]
    value = write.slice(rows.value, rows.axis, start, capacity + removed)
    if step > 1:
        bounds = [write.vector([each]) for each in (0, capacity, rows.axis, step)]
        value = write.node("Slice", [value, *bounds])
    context.results[context.node.output[0]] = replace(rows, selection=selection, value=value)
    return True


def _prefix_selection(context: NodeContext, prefix: PrefixLength, capacity: int) -> Selection:
    """Return the selection (the true elements of a mask) of as many first rows as `prefix` states,
    of at most `capacity` rows. Calls with an equal `prefix` return one selection.
    """
    root = prefix.root
    if (prefix.scale, prefix.offset) != (1, 0):
        root = f"{prefix.scale} x {prefix.root!r} + {prefix.offset}"
    if root in context.derived_selections:
        return context.derived_selections[root]
    return _new_prefix(context, root, prefix, capacity)


def _new_prefix(context: NodeContext, root: str, prefix: PrefixLength, capacity: int) -> Selection:
    """Write a mask of `capacity` elements that is true for as many first rows as `prefix` states,
    record its selection under the name `root`, and return it. Raises ModelError if `capacity` is
    below 1.
    """
    write = context.write
    count = prefix.count
    if capacity < 1:
        raise ModelError(
            f"the maximum number of rows of the result is {capacity}, expected at least 1",
            where=context.title,
        )
    if (prefix.scale, prefix.offset) != (1, 0):
        scaled = write.node("Mul", [count, write.scalar(prefix.scale, DType.INT64)])
        count = write.node("Add", [scaled, write.scalar(prefix.offset, DType.INT64)])
    mask = write.node("Less", [write.arange(capacity), count])
    selection = Selection(mask, (capacity,), (capacity,), context.title, root, prefix)
    context.derived_selections[root] = selection
    return selection
