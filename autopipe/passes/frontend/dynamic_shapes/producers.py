"""Operators that select elements by data: NonZero, Compress, Unique, NonMaxSuppression, and Range
up to a number that is computed while running.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Indices,
    SelectedRows,
    Selection,
    replace_size,
)
from autopipe.passes.frontend.dynamic_shapes.indices import write_indices
from autopipe.passes.frontend.dynamic_shapes.mask_roots import MaskRoots
from autopipe.passes.frontend.dynamic_shapes.node_context import NodeContext, make_selection
from autopipe.passes.frontend.dynamic_shapes.prefixes import bounded_prefix, make_limit_fact
from autopipe.passes.frontend.dynamic_shapes.size_operators import number_rows

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.uses import Uses

_VIEWS = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that pass on all elements of their first operand."""
_ELEMENT_VIEWS = _VIEWS | {"Gather", "Reshape", "Split", "Squeeze", "Unsqueeze"}
"""Operators that pass on elements of their first operand."""
_NO_BOUND = 1 << 62
"""Limit of the elements of a value that no Gather reads as indices."""


def record_selection(context: NodeContext, uses: Uses, roots: MaskRoots) -> None:
    """Record what a NonZero, Compress, Unique or NonMaxSuppression selects: its results become
    values with a row per selected element of a mask. `uses` has the readers of values, `roots`
    finds equal masks.
    """
    operator = context.node.op_type
    if operator == "NonMaxSuppression":
        _select_boxes(context)
    elif any(context.facts):
        _select_among_rows(context)
    else:
        data = context.types[context.operands[0]]
        match operator:
            case "NonZero":
                _select_nonzero(context, data, uses, roots)
            case "Compress":
                _select_by_condition(context, data, roots)
            case _:
                _select_unique(context, data)


def record_range(
    context: NodeContext, roots: MaskRoots, bounds: Mapping[str, int]
) -> CountedNumbers:
    """Record that the result of a Range from 0 in steps of 1, whose limit is computed while
    running, numbers the first rows of a vector. Return what is recorded of the limit: it is the
    number of these rows.

    `bounds` has the maximum number of elements of such results, by name. Raises ModelError if
    `bounds` lacks this result, unless an equal Range was seen before, and for another start or
    step.
    """
    result = context.node.output[0]
    limit = context.operands[1]
    start, step = (context.arrays.get(context.operands[slot]) for slot in (0, 2))
    if start is None or step is None or (start.item(), step.item()) != (0, 1):
        raise ModelError(
            "the limit of the range depends on data, so its start must be 0 and its step 1",
            where=context.title,
        )
    root = f"first {roots.integer_root(limit, context.types, context.arrays)!r}"
    if result not in bounds and root not in context.derived_selections:
        raise ModelError(
            f"the size of the result {result!r} depends on data",
            hint=f"set the maximum size with --dim {shlex.quote(f'{result}:0=SIZE')}",
            where=context.title,
        )
    factor = roots.known_divisor(limit, context.types, context.arrays)
    selection = context.derived_selections.get(root) or bounded_prefix(
        context, limit, root, bounds[result], factor
    )
    number_rows(context, selection)
    return make_limit_fact(context, selection, context.types[limit])


def _select_nonzero(context: NodeContext, data: Value, uses: Uses, roots: MaskRoots) -> None:
    """Record the coordinates of the nonzero elements of `data`. If the readers of the result show
    how many there are, write them with a static shape instead.
    """
    rank = len(data.shape)
    result = context.node.output[0]
    count = _count_split_results(result, uses) if rank == 1 else 0
    selection = nonzero_selection(context, data, roots)
    if count and selection.mask_shape == data.shape:
        limit = _minimum_indexed_size(result, uses, context.types)
        _write_known_count(context, selection.mask, data.shape[0], count, limit)
        return
    terms = np.eye(rank + 2, rank, -1, np.int64)[..., None]
    context.results[result] = Indices(selection, DType.INT64, 1, tuple(terms))


def nonzero_selection(context: NodeContext, data: Value, roots: MaskRoots) -> Selection:
    """Return the selection of the nonzero elements of the value `data`; its mask is written if
    `data` is not boolean. `roots` finds equal masks.
    """
    write = context.write
    rank = len(data.shape)
    name = data.name
    mask_shape: tuple[int, ...] = data.shape
    source = context.types.get(roots.source_of_expand(name))
    if source is not None:
        mask_shape = (*[1] * (rank - len(source.shape)), *source.shape)
        name = source.name
    root = roots.root(name, context.types, context.arrays)
    if len(mask_shape) != len(context.types[name].shape):
        name = write.reshape(name, mask_shape)
    mask = name if data.dtype is DType.BOOL else write.cast(name, DType.BOOL)
    return make_selection(context, mask, mask_shape, data.shape, root)


def _select_among_rows(context: NodeContext) -> None:
    """Record what a NonZero selects among rows that a mask selects already. Each row has one
    element. The result has, for each row whose element is not 0, its rank: the number of selected
    rows before it. Raises ModelError for other operators and rows.
    """
    rows = context.fact(0)
    write = context.write
    if context.node.op_type != "NonZero" or not isinstance(rows, SelectedRows):
        raise context.unsupported_error()
    if rows.row_type.shape != (1,):
        raise context.unsupported_error()
    former = rows.selection
    rows = write.spread(write.apply_weights(rows), former.axes)
    mask = write.node("And", [write.flat_mask(former), write.cast(rows.value, DType.BOOL)])
    shape = (rows.shape[0],)
    root = f"{former.key} {context.operands[0]}"
    selection = make_selection(context, mask, shape, shape, root)
    ranks = write.reshape(write.ranks(former), (1, rows.shape[0]))
    context.results[context.node.output[0]] = SelectedRows(
        selection, Value("", DType.INT64, (1, 1)), 1, (0,), ranks
    )


def _write_known_count(
    context: NodeContext, mask: str, extent: int, count: int, limit: int
) -> None:
    """Write the result of a NonZero with a static shape: the positions of the `count` true elements
    of a mask with `extent` elements, such as the experts that have tokens in the traced example.

    All positions are below `limit`. If `count` is at least the smaller of `limit` and `extent`, the
    positions are 0 … `count` - 1.
    """
    write = context.write
    positions = write.vector(range(count))
    if count < min(limit, extent):
        positions = write.node("Gather", [write.positions_selected_first(mask, extent), positions])
    write.reshape(positions, (1, count), context.node.output[0])


def _count_split_results(name: str, uses: Uses) -> int:
    """Return the number of results of a Split that is the only reader of the value `name`, directly
    or after casts, transposes and other views. An exporter that unrolls a loop over the elements of
    the value writes such a Split. 0 if there is no Split, or if it has one result.
    """
    readers = _find_readers(name, uses, _VIEWS)
    if len(readers) != 1:
        return 0
    ((node, _),) = readers
    count = len(node.output)
    return count if node.op_type == "Split" and count > 1 else 0


def _minimum_indexed_size(name: str, uses: Uses, types: Mapping[str, Value]) -> int:
    """Return the minimum size of the dimensions that Gathers index with elements of the value
    `name`, a very large number if there is none.
    """
    sizes = [_NO_BOUND]
    for node, slot in _find_readers(name, uses, _ELEMENT_VIEWS):
        data = types.get(node.input[0])
        if node.op_type == "Gather" and slot == 1 and data is not None:
            axis = next((int(each.i) for each in node.attribute if each.name == "axis"), 0)
            sizes.append(data.shape[axis])
    return min(sizes)


def _find_readers(
    name: str, uses: Uses, through: frozenset[str]
) -> list[tuple[onnx.NodeProto, int]]:
    """Return (node, operand index) of each reader of the value `name`. A reader whose operator is
    in `through` and that has the value as first operand is replaced by the readers of its results.
    """
    found = []
    waiting = [name]
    while waiting:
        for node, slot in uses.readers.get(waiting.pop(), ()):
            if node.op_type in through and slot == 0:
                waiting += node.output
            else:
                found.append((node, slot))
    return found


def _select_by_condition(context: NodeContext, data: Value, roots: MaskRoots) -> None:
    """Record the slices of `data` that a Compress selects along its axis, or the elements if it has
    no axis.
    """
    write = context.write
    name = data.name
    shape = data.shape
    axis = nonnegative_axis(context.integer("axis"), len(shape))
    if not context.has_attribute("axis"):
        shape = (data.elements,)
        name = write.reshape(name, shape)
    (count,) = context.types[context.operands[1]].shape
    mask = context.operands[1]
    root = roots.root(mask, context.types, context.arrays)
    if count < shape[axis]:
        name = write.slice(name, axis, 0, count)
    elif count > shape[axis]:
        count = shape[axis]
        mask = write.slice(mask, 0, 0, count)
        root = mask
    selection = make_selection(context, mask, (count,), (count,), root)
    row_type = Value("", data.dtype, replace_size(shape, axis, 1))
    context.results[context.node.output[0]] = SelectedRows(selection, row_type, axis, (0,), name)


def _select_boxes(context: NodeContext) -> None:
    """Record the rows [image, class, box] that a NonMaxSuppression selects. Its mask has, per image
    and class, as many elements as boxes exist, or the maximum that the file states if this is
    lower.
    """
    write = context.write
    named = context.operands[2] if len(context.operands) > 2 else ""
    known = context.arrays.get(named)
    boxes, scores = _static_boxes_and_scores(context)
    maximum = scores.shape[-1]
    if named and known is not None:
        maximum = min(maximum, int(known.reshape(-1)[0]))
    if not named or maximum < 1:
        raise ModelError(
            "the node selects no box because the third operand, the maximum number of boxes per "
            f"class, is {maximum if named else 'absent'}, expected at least 1",
            where=context.title,
        )
    overlap, score_limit = (*context.operands, "", "")[3:5]
    if context.facts[1] is not None and not score_limit:
        score_limit = write.scalar(float(np.finfo(np.float32).min), DType.FLOAT32)
    numbers = write.node(
        "NonMaxSuppression",
        [boxes.name, scores.name, overlap, score_limit],
        domain="autopipe",
        most=maximum,
        center_point_box=context.integer("center_point_box"),
    )
    is_absent = write.node("Less", [numbers, write.scalar(0, DType.INT64)])
    mask = write.node("Not", [is_absent])
    if known is None:
        is_allowed = write.node("Less", [write.arange(maximum), named])
        mask = write.node("And", [mask, is_allowed])
    shape = (*scores.shape[:2], maximum)
    selection = make_selection(context, mask, shape, shape)
    zero = np.zeros((1, 2), int)
    terms = (zero, np.array([[1, 0]]), np.array([[0, 1]]), zero, zero)
    image_and_class = write_indices(write, Indices(selection, DType.INT64, 0, terms))
    columns = [
        write.spread(image_and_class, selection.axes).value,
        write.reshape(numbers, (selection.capacity, 1)),
    ]
    rows = write.node("Concat", columns, axis=1)
    context.results[context.node.output[0]] = SelectedRows(
        selection, Value("", DType.INT64, (1, 3)), 0, selection.axes, rows
    )


def _static_boxes_and_scores(context: NodeContext) -> tuple[Value, Value]:
    """Return the boxes and their scores as static values. If a mask selects the rows of both, the
    selected ones come first, and the others have the score −∞. Raises ModelError if a mask selects
    the rows of only one, or if their masks differ.
    """
    boxes, scores = context.facts[:2]
    if boxes is None and scores is None:
        return context.types[context.operands[0]], context.types[context.operands[1]]
    if not isinstance(boxes, SelectedRows) or not isinstance(scores, SelectedRows):
        raise context.unsupported_error()
    if (boxes.axis, scores.axis) != (1, 2) or boxes.selection.key != scores.selection.key:
        raise context.unsupported_error()
    write = context.write
    boxes = write.fill_unselected(boxes, 0.0, boxes.selection.axes)
    scores = write.fill_unselected(scores, -math.inf, scores.selection.axes)
    return write.pack(boxes), write.pack(scores)


def _select_unique(context: NodeContext, data: Value) -> None:
    """Record the distinct elements of `data` that a Unique selects: it sorts all elements and
    selects the first of several equal elements. Raises ModelError unless the node has sorted=1 and
    no axis.
    """
    if context.has_attribute("axis") or not context.integer("sorted", 1):
        raise ModelError(
            "Unique is supported only with sorted=1 and without an axis", where=context.title
        )
    write = context.write
    count = data.elements
    unique, first_positions, inverse, counts = (*context.node.output, "", "", "")[:4]
    values, positions = write.sort(write.reshape(data.name, (count,)), count)
    behind = write.slice(values, 0, 1, count)
    before = write.slice(values, 0, 0, count - 1)
    is_equal = write.node("Equal", [behind, before])
    true = write.cast(write.vector([1]), DType.BOOL)
    mask = write.node("Concat", [true, write.node("Not", [is_equal])], axis=0)
    selection = make_selection(context, mask, (count,), (count,))
    zeros = write.expand(write.vector([0]), (1,), (count,))
    one = write.scalar(1, DType.INT64)
    order = write.node("CumSum", [write.cast(mask, DType.INT64), write.scalar(0, DType.INT64)])
    rank = write.node("Sub", [order, one])
    if inverse:
        write.node("ScatterElements", [zeros, positions, rank], inverse, axis=0)
    found = {unique: (values, data.dtype)}
    if first_positions:
        beyond = write.node("Add", [zeros, write.scalar(count, DType.INT64)])
        first = write.node("ScatterElements", [beyond, rank, positions], axis=0, reduction="min")
        found[first_positions] = (write.node("Gather", [first, rank]), DType.INT64)
    if counts:
        ones = write.node("Add", [zeros, one])
        runs = write.node("ScatterElements", [zeros, rank, ones], axis=0, reduction="add")
        found[counts] = (write.node("Gather", [runs, rank]), DType.INT64)
    for name, (value, dtype) in found.items():
        if name:
            row_type = Value("", dtype, (1,))
            context.results[name] = SelectedRows(selection, row_type, 0, (0,), value)
