"""The first of some rows, as many as data tell, and operators that read neighbours along them.

What lies behind the last row is held as a file's own operators see it there: zeros before a
convolution.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.places import nothing_for
from autopipe.passes.frontend.selections.rows import ROWS, Prefix, Rows, Selection
from autopipe.passes.frontend.selections.use import OTHER_ROWS, Counted, Use


def bounded(use: Use, limit: str, root: str, most: int, factor: int) -> Selection:
    """The first rows, as many as a number of the file says, a multiple of `factor`; more than
    `most` stop the program.
    """
    write = use.write
    result = use.node.output[0]
    dtype = use.types[limit].dtype
    told = write.reshape(limit, ())
    checked = write.node("Bounded", [told], domain="autopipe", most=most, title=f"{result}:0")
    count = write.cast(write.node("Ceil", [checked]) if dtype.is_floating else checked, DType.INT64)
    if factor == 1 or most < factor:
        return _first(use, root, Prefix(count, root), most)
    part = write.node("Div", [count, write.number(factor, DType.INT64)])
    use.joins[root] = _told(
        use, Prefix(part, f"{root} / {factor}", factor), most // factor * factor
    )
    return use.joins[root]


def limit_of(use: Use, selection: Selection, limit: Value) -> Counted:
    """A number that tells how many the first rows are."""
    kind = np.float64 if limit.dtype.is_floating else np.int64
    part, one, other = in_parts(use, selection)
    return Counted(part, (np.full(limit.shape, one, kind), np.full(limit.shape, other, kind)))


def in_parts(use: Use, selection: Selection) -> tuple[Selection, int, int]:
    """How many are chosen in terms of that of which the first rows are a multiple, for `ROWS` and
    `OTHER_ROWS` of it: what divides them is exact.
    """
    first = selection.first
    if first is None or (first.scale, first.offset) == (1, 0):
        return selection, ROWS, OTHER_ROWS
    part = _told(
        use, replace(first, scale=1, offset=0), (selection.shape[0] - first.offset) // first.scale
    )
    use.joins.setdefault((part.key, first.scale, first.offset), selection)
    return part, first.scale * ROWS + first.offset, first.scale * OTHER_ROWS + first.offset


def first_of(use: Use, selection: Selection, scale: int, offset: int) -> Selection:
    """Of a vector of `scale` times the places and `offset` the first rows, of as many as are
    chosen.
    """
    first = selection.first
    assert first is not None
    told = replace(first, scale=first.scale * scale, offset=first.offset * scale + offset)
    found = _told(use, told, selection.shape[0] * scale + offset)
    use.joins.setdefault((selection.key, scale, offset), found)
    return found


def _told(use: Use, prefix: Prefix, most: int) -> Selection:
    root = (
        prefix.root
        if (prefix.scale, prefix.offset) == (1, 0)
        else f"{prefix.scale} x {prefix.root!r} + {prefix.offset}"
    )
    return use.joins.get(root) or _first(use, root, prefix, most)


def at_most(use: Use, selection: Selection, most: int) -> Selection:
    """The first of the chosen, but no more than a number."""
    root = most_root(selection, most)
    return use.joins.get(root) or _first(
        use, root, Prefix(use.write.counted(selection), root), most
    )


def most_root(selection: Selection, most: int) -> str:
    return f"{selection.key}, at most {most}"


def _first(use: Use, root: str, prefix: Prefix, most: int) -> Selection:
    write = use.write
    count = prefix.count
    if most < 1:
        raise ModelError(
            "it leaves none of the rows, at most as many as data may choose", where=use.where
        )
    if (prefix.scale, prefix.offset) != (1, 0):
        scaled = write.node("Mul", [count, write.number(prefix.scale, DType.INT64)])
        count = write.node("Add", [scaled, write.number(prefix.offset, DType.INT64)])
    steps = write.node("Range", [write.number(each, DType.INT64) for each in (0, most, 1)])
    use.joins[root] = Selection(
        write.node("Less", [steps, count]), (most,), (most,), use.where, root, prefix
    )
    return use.joins[root]


def neighbours(use: Use, rows: Rows, type_: Value) -> bool:
    """Write a node that reads each of the first rows with its neighbours; False for another node.
    `type_` is that of its result where there are `ROWS` rows.
    """
    selection = rows.selection
    operator = use.node.op_type
    if (
        selection.first is None
        or rows.beside is not None
        or any(each is not None for each in use.held[1:])
    ):
        return False
    match operator:
        case "Conv" | "ConvTranspose" | "MaxPool":
            fill, found = _windows(use, rows)
        case "Pad":
            fill, found = _pads(use, rows)
        case _:
            return False
    if found is None:
        return False
    write = use.write
    result = use.node.output[0]
    held = write.filled(write.whole(rows), fill, selection.axes)
    names = [held.value, *use.operands[1:]]
    write.again(names, [f"{result}/rows"])
    type_ = replace(
        type_, name="", shape=(*type_.shape[: rows.axis], ROWS, *type_.shape[rows.axis + 1 :])
    )
    use.found[result] = Rows(found, type_, rows.axis, (0,), f"{result}/rows")
    return True


def _windows(use: Use, rows: Rows) -> tuple[float, Selection | None]:
    """The number behind the last row, and the rows of the result, of which there are as many as
    windows.
    """
    lists = {each.name: list(each.ints) for each in use.node.attribute}
    words = {each.name: each.s.decode(errors="replace") for each in use.node.attribute}
    pooled = use.node.op_type == "MaxPool"
    place = rows.axis - 2
    dims = len(rows.type.shape) - 2
    kernel = lists.get("kernel_shape") or [
        *(use.types[use.operands[1]].shape[2:] if not pooled else ())
    ]
    plain = (
        not use.attribute("ceil_mode")
        and not lists.get("output_shape")
        and not any(use.node.output[1:])
    )
    if place < 0 or len(kernel) != dims or not plain:
        return 0.0, None
    stride, dilation = (lists.get(name, [1] * dims)[place] for name in ("strides", "dilations"))
    pads = lists.get("pads", [0] * 2 * dims)
    width = dilation * (kernel[place] - 1) + 1
    added = pads[place] + pads[dims + place]
    fill = nothing_for(-math.inf, rows.type.dtype) if pooled else 0.0
    transposed = use.node.op_type == "ConvTranspose"
    match words.get("auto_pad", "NOTSET"):
        case "SAME_UPPER" | "SAME_LOWER" if stride == 1 and not transposed:
            added = width - 1
        case "VALID":
            added = 0
        case "NOTSET" | "":
            pass
        case _:
            return 0.0, None
    if transposed:
        behind = lists.get("output_padding", [0] * dims)[place]
        return fill, first_of(use, rows.selection, stride, width + behind - added - stride)
    return fill, _strided(use, rows.selection, stride, added - width + 1)


def _strided(use: Use, selection: Selection, stride: int, offset: int) -> Selection:
    """Every `stride`-th of the first rows and `offset` more, from the first on."""
    if stride == 1:
        return first_of(use, selection, 1, offset)
    write = use.write
    first = selection.first
    root = f"{selection.root!r} by {stride} from {offset}"
    assert first is not None
    most = (selection.shape[0] + offset - 1) // stride + 1
    if first.scale % stride == 0:
        behind = (first.offset + offset - 1) // stride + 1
        return _told(use, replace(first, scale=first.scale // stride, offset=behind), most)
    if root in use.joins:
        return use.joins[root]
    numbers = (first.scale, first.offset + offset - 1 + stride, stride)
    scale, added, step = (write.number(each, DType.INT64) for each in numbers)
    count = write.node(
        "Div", [write.node("Add", [write.node("Mul", [first.count, scale]), added]), step]
    )
    return _first(use, root, Prefix(count, root), most)


def _pads(use: Use, rows: Rows) -> tuple[float, Selection | None]:
    """The number behind the last row, and the rows of the result, of which there are more or
    fewer.
    """
    known = (*use.numbers(), None, None, None)[:4]
    rank = len(rows.type.shape)
    stated = next(
        (list(each.ints) for each in use.node.attribute if each.name in ("pads", "paddings")), None
    )
    pads = stated if known[1] is None else known[1].reshape(-1).tolist()
    axes = (
        [*range(rank)]
        if known[3] is None
        else [positive(int(each), rank) for each in known[3].reshape(-1)]
    )
    mode = next((each.s for each in use.node.attribute if each.name == "mode"), b"constant")
    if pads is None or len(pads) != 2 * len(axes) or rows.axis not in axes:
        return 0.0, None
    place = axes.index(rows.axis)
    fill = 0.0
    before = pads[place]
    behind = pads[len(axes) + place]
    if mode == b"constant" and len(use.operands) > 2 and use.operands[2]:
        if known[2] is None:
            return 0.0, None
        fill = float(known[2].reshape(()))
    elif mode == b"constant":
        fill = next((each.f for each in use.node.attribute if each.name == "value"), 0.0)
    elif behind > 0 or (mode == b"wrap" and before > 0):
        return 0.0, None
    return fill, first_of(use, rows.selection, 1, before + behind)


def cut_first(use: Use, rows: Rows, start: int, end: int, step: int) -> bool:
    """Cut the first rows from a number on, every `step`-th of them, and before one counted from the
    last; False for other bounds.
    """
    if rows.selection.first is None or start < 0 or 0 <= end < ROWS:
        return False
    less = min(end, 0)
    found = _strided(use, rows.selection, step, less - start)
    write = use.write
    rows = write.placed(write.whole(rows), rows.selection.axes)
    value = write.sliced(rows.value, rows.axis, start, rows.shape[rows.axis] + less)
    if step > 1:
        bounds = [write.numbers([each]) for each in (0, rows.shape[rows.axis], rows.axis, step)]
        value = write.node("Slice", [value, *bounds])
    use.found[use.node.output[0]] = replace(rows, selection=found, value=value)
    return True
