"""Chosen rows in other numbers: flattened, taken apart again, joined with others.

Flattened rows of four numbers are chosen by the same mask with a last axis of four, along which it
is broadcast: the mask that `NonZero` reads where a file puts such numbers back.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.places import Places, as_rows
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection, Writer
from autopipe.passes.frontend.selections.use import OTHER_ROWS, SHAPE_OPERANDS, Counted, Use


def reshaped(use: Use) -> bool:
    """A Reshape of rows into others of another size; False where the node is none, or leaves rows
    as they are.
    """
    if use.node.op_type not in ("Flatten", "Reshape"):
        return False
    rows = use.held[0]
    target = (*use.numbers(), None)[1]
    if use.node.op_type == "Flatten" and isinstance(rows, Rows | Places):
        target = np.array([-1, math.prod(rows.type.shape[use.attribute("axis", 1) :])])
    if not isinstance(rows, Rows | Places) or rows.axis or target is None or target.ndim != 1:
        return False
    shape = [extent or rows.type.shape[place] for place, extent in enumerate(target.tolist())]
    inner = math.prod(rows.type.shape[1:])
    rest = shape[1:]
    size = math.prod(rest)
    if (
        not shape
        or min(rest, default=1) < 1
        or size >= ROWS
        or (shape[0] > 0 and shape[0] % ROWS == shape[0])
    ):
        return False
    if size == inner:
        return False
    held = as_rows(use.write, rows) if isinstance(rows, Places) else rows
    found = _taken_apart(use.write, _flattened(use.write, held), rest)
    if found is not None:
        use.found[use.node.output[0]] = found
    return found is not None


def _flattened(write: Writer, rows: Rows) -> Rows:
    """All numbers of the rows, one behind the other."""
    selection = rows.selection
    inner = rows.type.shape[1:]
    if not inner:
        return rows
    rows = write.whole(rows)
    held = (*selection.held, *[1] * len(inner))
    shape = (*selection.shape, *inner)
    wide = replace(
        selection,
        mask=write.reshape(selection.mask, held),
        held=held,
        shape=shape,
        root=selection.key[0],
    )
    over = (*rows.over, *range(len(selection.shape), len(shape)))
    value = write.reshape(rows.value, (wide.extent(over),))
    return Rows(wide, replace(rows.type, shape=(ROWS,)), 0, over, value)


def _taken_apart(write: Writer, rows: Rows, rest: list[int]) -> Rows | None:
    """Numbers as rows of shape `rest`; None where the mask does not choose as many at once."""
    size = math.prod(rest)
    selection = rows.selection
    if size == 1 and not rest:
        return rows
    axis = len(selection.shape)
    block = 1
    while axis > 1 and selection.held[axis - 1] == 1 and block % size:
        axis -= 1
        block *= selection.shape[axis]
    if block % size:
        return None
    rows = write.placed(write.whole(rows), tuple(range(axis, len(selection.shape))))
    held = selection.held[:axis]
    shape = selection.shape[:axis]
    over = [each for each in rows.over if each < axis]
    if block > size:
        held = (*held, 1)
        shape = (*shape, block // size)
        over = [*over, axis]
    narrow = replace(
        selection,
        mask=write.reshape(selection.mask, held),
        held=held,
        shape=shape,
        root=selection.key[0],
    )
    value = write.reshape(rows.value, (narrow.extent(over), *rest))
    return Rows(narrow, replace(rows.type, shape=(ROWS, *rest)), 0, tuple(over), value)


def joined(use: Use) -> bool:
    """A Concat of rows with others, which data may choose as well or not; False where the node is
    none.
    """
    if use.node.op_type != "Concat":
        return False
    write = use.write
    result = use.node.output[0]
    held = [each for each in use.held if not isinstance(each, Counted)]
    if len(held) < len(use.held):
        return False
    read = zip(use.operands, held, strict=True)
    types = [use.types[name] if each is None else each.type for name, each in read]
    axis = positive(use.attribute("axis"), len(types[0].shape))
    if any(each is not None and each.axis != axis for each in held):
        return False
    parts = [
        value if each is None else _of_all(write, each)
        for value, each in zip(types, held, strict=True)
    ]
    selection = _join(use, parts, axis)
    shape = types[0].shape
    type_ = Value("", types[0].dtype, (*shape[:axis], ROWS, *shape[axis + 1 :]))
    names = [part.name if isinstance(part, Value) else part.value for part in parts]
    joined_value = write.node("Concat", names, f"{result}/rows", axis=axis)
    use.found[result] = Rows(selection, type_, axis, (0,), joined_value)
    return True


def _of_all(write: Writer, held: Rows | Places) -> Rows:
    """The rows for every place of the mask."""
    rows = as_rows(write, held) if isinstance(held, Places) else held
    return write.placed(write.whole(rows), rows.selection.axes)


def _join(use: Use, parts: list[Value | Rows], axis: int) -> Selection:
    """The mask of all parts, one behind the other: all of a static one is chosen."""
    write = use.write
    extents = [part.shape[axis] for part in parts]
    keys = [None if isinstance(part, Value) else part.selection.key for part in parts]
    whole = tuple(zip(keys, extents, strict=True))
    if whole not in use.joins:
        lines = [
            write.expand(write.cast(write.numbers([1]), DType.BOOL), (1,), (extent,))
            if isinstance(part, Value)
            else write.line(part.selection)
            for part, extent in zip(parts, extents, strict=True)
        ]
        mask = write.node("Concat", lines, axis=0)
        total = (sum(extents),)
        use.joins[whole] = Selection(mask, total, total, use.where, f"{use.where} {len(use.joins)}")
    chosen = [key for key in keys if key is not None]
    if len(set(chosen)) == 1:
        fixed = sum(extent for key, extent in whole if key is None)
        use.joins.setdefault((chosen[0], len(chosen), fixed), use.joins[whole])
    return use.joins[whole]


def of_joined(use: Use, counted: Counted) -> Counted:
    """The same numbers in terms of rows that were joined or flattened, where they are as many as
    those and no other number depends on data.
    """
    first, second = counted.numbers
    moving = first != second
    if not moving.any() or first.dtype.kind != "i":
        return counted
    slope = (second - first)[moving] // (OTHER_ROWS - ROWS)
    fixed = first[moving] - slope * ROWS
    if (slope != slope[0]).any() or (fixed != fixed[0]).any() or (slope[0] == 1 and not fixed[0]):
        return counted
    selection = use.joins.get((counted.selection.key, int(slope[0]), int(fixed[0])))
    if selection is None or (
        selection.first is not None and use.node.op_type not in SHAPE_OPERANDS
    ):
        return counted
    numbers = (first.copy(), first.copy())
    for array, count in zip(numbers, (ROWS, OTHER_ROWS), strict=True):
        array[moving] = count
    return Counted(selection, numbers)
