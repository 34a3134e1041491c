"""Laws (functions that write a node with static shapes) of reshapes that change the size of a
selected row, and of concatenations of rows. A row is selected if its element of a mask is true.

If selected rows of four elements are flattened, the elements are selected by the same mask with one
more axis of size 4, along which the mask is broadcast. The file selects the same elements if it
applies `NonZero` to that broadcast mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Indices,
    SelectedRows,
    Selection,
    row_type_of,
)
from autopipe.passes.frontend.dynamic_shapes.indices import to_selected_rows
from autopipe.passes.frontend.dynamic_shapes.node_context import (
    SHAPE_OPERANDS,
    NodeContext,
    NodeFacts,
)
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter
from autopipe.passes.frontend.dynamic_shapes.sizes import SizeArray


def regroup_rows(context: NodeContext) -> bool:
    """Write a Reshape or Flatten of selected rows (rows whose mask element is true), which axis 0
    counts, into rows of another size. Return False for a reshape that keeps the size of a row, and
    for one that is not supported.
    """
    fact = context.fact(0)
    if not isinstance(fact, Indices | SelectedRows) or fact.axis:
        return False
    row_shape = fact.row_type.shape[1:]
    target = _target_row_shape(context, row_shape)
    if target is None:
        return False
    size = math.prod(target)
    if min(target, default=1) < 1 or size == math.prod(row_shape):
        return False
    rows = to_selected_rows(context.write, fact)
    found = _divide_rows(context.write, _flatten_rows(context.write, rows), target)
    if found is not None:
        context.results[context.node.output[0]] = found
    return found is not None


def _target_row_shape(context: NodeContext, row_shape: tuple[int, ...]) -> list[int] | None:
    """Return the shape of a row of the result of a Reshape or Flatten; `row_shape` is that of the
    operand. None if it is not known, or if the first dimension of the result does not count rows.
    """
    if context.node.op_type == "Flatten":
        axis = context.integer("axis", 1)
        return [math.prod((1, *row_shape)[axis:])]
    target = context.operand_number(1)
    if target is None or len(target.shape) != 1 or not target.shape[0]:
        return None
    if isinstance(target, SizeArray):
        first, *others = target.elements()
        if not any(first[1:]) or first[0] or any(any(each[1:]) for each in others):
            return None
        sizes = [int(each[0]) for each in others]
    else:
        if target[0] > 0:
            return None
        sizes = target[1:].tolist()
    shape = [*row_shape, *[0] * len(sizes)]
    return [size or shape[place] for place, size in enumerate(sizes)]


def _flatten_rows(write: RowWriter, rows: SelectedRows) -> SelectedRows:
    """Return `rows` flattened: each element becomes a row, which is selected if the row that
    contained it is.
    """
    selection = rows.selection
    row_shape = rows.row_type.shape[1:]
    if not row_shape:
        return rows
    rows = write.apply_weights(rows)
    mask_shape = (*selection.mask_shape, *[1] * len(row_shape))
    shape = (*selection.shape, *row_shape)
    wide = replace(
        selection,
        mask=write.reshape(selection.mask, mask_shape),
        mask_shape=mask_shape,
        shape=shape,
        root=selection.key[0],
    )
    over = (*rows.over, *range(len(selection.shape), len(shape)))
    value = write.reshape(rows.value, (wide.size_along(over),))
    return SelectedRows(wide, replace(rows.row_type, shape=(1,)), 0, over, value)


def _divide_rows(write: RowWriter, rows: SelectedRows, row_shape: list[int]) -> SelectedRows | None:
    """Return `rows`, of one element each, regrouped into rows of the shape `row_shape`.

    All elements of a new row must be selected together. This holds if the mask that selects `rows`
    is broadcast along its last axes, and the product of the sizes of these axes is a multiple of
    the elements of a new row. Otherwise return None.
    """
    size = math.prod(row_shape)
    selection = rows.selection
    if not row_shape:
        return rows
    axis = len(selection.shape)
    block = 1
    while axis > 1 and selection.mask_shape[axis - 1] == 1 and block % size:
        axis -= 1
        block *= selection.shape[axis]
    if block % size:
        return None
    rows = write.spread(write.apply_weights(rows), tuple(range(axis, len(selection.shape))))
    mask_shape = selection.mask_shape[:axis]
    shape = selection.shape[:axis]
    over = [each for each in rows.over if each < axis]
    if block > size:
        mask_shape = (*mask_shape, 1)
        shape = (*shape, block // size)
        over = [*over, axis]
    regrouped = replace(
        selection,
        mask=write.reshape(selection.mask, mask_shape),
        mask_shape=mask_shape,
        shape=shape,
        root=selection.key[0],
    )
    value = write.reshape(rows.value, (regrouped.size_along(over), *row_shape))
    row_type = replace(rows.row_type, shape=(1, *row_shape))
    return SelectedRows(regrouped, row_type, 0, tuple(over), value)


def join_rows(context: NodeContext) -> bool:
    """Write a Concat, along the dimension that counts selected rows (rows whose mask element is
    true), of selected rows and static values. Return False if a part counts rows along another
    dimension, or consists of numbers that depend on the count of rows.
    """
    write = context.write
    result = context.node.output[0]
    facts = [each for each in context.facts if not isinstance(each, CountedNumbers)]
    if len(facts) < len(context.facts):
        return False
    types = [
        context.types[name] if each is None else each.row_type
        for name, each in zip(context.operands, facts, strict=True)
    ]
    axis = nonnegative_axis(context.integer("axis"), len(types[0].shape))
    if any(each is not None and each.axis != axis for each in facts):
        return False
    parts: list[Value | SelectedRows] = []
    for value, fact in zip(types, facts, strict=True):
        if fact is None:
            parts.append(value)
            continue
        rows = to_selected_rows(write, fact)
        parts.append(write.spread(write.apply_weights(rows), rows.selection.axes))
    selection = _joined_selection(context, parts, axis)
    names = [part.name if isinstance(part, Value) else part.value for part in parts]
    joined = write.node("Concat", names, f"{result}/rows", axis=axis)
    context.results[result] = SelectedRows(
        selection, row_type_of(types[0], axis), axis, (0,), joined
    )
    return True


def _joined_selection(
    context: NodeContext, parts: Sequence[Value | SelectedRows], axis: int
) -> Selection:
    """Return the selection (the true elements of a mask) of the rows of all `parts`, concatenated
    along `axis`. Its mask is the concatenation of their masks; every row of a static part is
    selected.
    """
    write = context.write
    extents = [part.shape[axis] for part in parts]
    keys = [None if isinstance(part, Value) else part.selection.key for part in parts]
    pairs = tuple(zip(keys, extents, strict=True))
    if pairs not in context.derived_selections:
        masks = []
        for part, extent in zip(parts, extents, strict=True):
            if isinstance(part, Value):
                true = write.cast(write.vector([1]), DType.BOOL)
                masks.append(write.expand(true, (1,), (extent,)))
            else:
                masks.append(write.flat_mask(part.selection))
        mask = write.node("Concat", masks, axis=0)
        total = (sum(extents),)
        root = f"{context.title} {len(context.derived_selections)}"
        context.derived_selections[pairs] = Selection(mask, total, total, context.title, root)
    joined = context.derived_selections[pairs]
    selected = [key for key in keys if key is not None]
    if len(set(selected)) == 1:
        fixed = sum(extent for key, extent in pairs if key is None)
        context.derived_selections.setdefault((selected[0], len(selected), fixed), joined)
    return joined


def express_by_derived_selection(context: NodeFacts, counted: CountedNumbers) -> CountedNumbers:
    """Return `counted` as polynomials in the number of rows of another selection, which was derived
    from that of `counted`. A selection is the true elements of a mask. Return `counted` itself if
    this is not possible.

    It is possible only if all elements that depend on n, the number of rows of the original
    selection, are one expression `scale * n + offset`, and if a derived selection with that many
    rows is recorded. These elements are then the number of rows of the derived selection.
    """
    numbers = counted.numbers
    if numbers.dtype.kind != "i" or numbers.degree != 1:
        return counted
    scales = numbers.coefficient(1)
    depends = scales != 0
    pairs = {*zip(scales[depends].tolist(), numbers.offset[depends].tolist(), strict=True)}
    if len(pairs) != 1 or pairs == {(1, 0)}:
        return counted
    ((scale, offset),) = pairs
    selection = context.derived_selections.get((counted.selection.key, scale, offset))
    if selection is None:
        return counted
    if selection.first_rows is not None and context.node.op_type not in SHAPE_OPERANDS:
        return counted
    offsets = np.where(depends, 0, numbers.offset)
    return CountedNumbers(
        selection, SizeArray.from_coefficients([offsets, depends.astype(numbers.dtype)])
    )
