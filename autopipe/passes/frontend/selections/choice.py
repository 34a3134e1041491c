"""Operators that choose by data: `NonZero`, `Compress`, `Unique`, `NonMaxSuppression`, `Range` up
to what data tell.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.counts import number
from autopipe.passes.frontend.selections.masks import Masks
from autopipe.passes.frontend.selections.neighbours import bounded, limit_of
from autopipe.passes.frontend.selections.places import Places, as_rows
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection
from autopipe.passes.frontend.selections.use import Counted, Use, selection_of

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.uses import Uses

CHOOSING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
_HANDED_ON = frozenset({"Transpose", "Cast", "Identity"})
_TAKEN_APART = _HANDED_ON | {"Split", "Squeeze", "Unsqueeze", "Reshape", "Gather"}


def choose(use: Use, uses: Uses, masks: Masks) -> None:
    """The places or rows that the node chooses."""
    operator = use.node.op_type
    if operator == "NonMaxSuppression":
        _suppress(use)
        return
    if any(use.held):
        _choose_again(use)
        return
    data = use.types[use.operands[0]]
    match operator:
        case "NonZero":
            _non_zero(use, data, uses, masks)
        case "Compress":
            _compress(use, data, masks)
        case _:
            _unique(use, data)


def choose_first(use: Use, masks: Masks, bounds: Mapping[str, int]) -> Counted:
    """The numbers from 0 on, before one that data tell; what this one is in terms of rows."""
    result = use.node.output[0]
    limit = use.operands[1]
    start, _, step = use.numbers()
    if start is None or step is None or (start.item(), step.item()) != (0, 1):
        raise ModelError(
            "data tell its limit: it is supported from 0 on in steps of 1", where=use.where
        )
    root = f"first {masks.number(limit, use.types, use.arrays)!r}"
    if result not in bounds and root not in use.joins:
        raise ModelError(
            f"data tell how many numbers its result {result!r} has",
            hint=f"add --dim {shlex.quote(f'{result}:0=EXTENT')} with the most that there may be",
            where=use.where,
        )
    factor = masks.factor(limit, use.types, use.arrays)
    selection = use.joins.get(root) or bounded(use, limit, root, bounds[result], factor)
    number(use, selection)
    return limit_of(use, selection, use.types[limit])


def _non_zero(use: Use, data: Value, uses: Uses, masks: Masks) -> None:
    rank = len(data.shape)
    result = use.node.output[0]
    known = _split_into(result, uses) if rank == 1 else 0
    selection = chosen_by(use, data, masks)
    if known and selection.held == data.shape:
        _known_many(use, selection.mask, data.shape[0], known, _below(result, uses, use.types))
        return
    terms = np.eye(rank + 2, rank, -1, np.int64)[..., None]
    use.found[result] = Places(selection, Value("", DType.INT64, (rank, ROWS)), 1, tuple(terms))


def chosen_by(use: Use, data: Value, masks: Masks) -> Selection:
    """The elements of a value that are not zero."""
    write = use.write
    rank = len(data.shape)
    name = data.name
    held: tuple[int, ...] = data.shape
    source = use.types.get(masks.broadcast_from(name))
    if source is not None:
        held = (*[1] * (rank - len(source.shape)), *source.shape)
        name = source.name
    root = masks.root(name, use.types, use.arrays)
    if len(held) != len(use.types[name].shape):
        name = write.reshape(name, held)
    mask = name if data.dtype is DType.BOOL else write.cast(name, DType.BOOL)
    return selection_of(use, mask, held, data.shape, root)


def _choose_again(use: Use) -> None:
    """The numbers, among chosen rows of one number each, of those that are not zero: they are
    chosen of these.
    """
    rows = use.held[0]
    write = use.write
    if use.node.op_type != "NonZero" or not isinstance(rows, Rows) or rows.type.shape != (ROWS,):
        raise use.refused()
    rows = write.placed(write.whole(rows), rows.selection.axes)
    mask = write.node("And", [write.line(rows.selection), write.cast(rows.value, DType.BOOL)])
    selection = selection_of(
        use, mask, (rows.shape[0],), (rows.shape[0],), f"{rows.selection.key} {use.operands[0]}"
    )
    places = write.reshape(write.ranks(rows.selection), (1, rows.shape[0]))
    use.found[use.node.output[0]] = Rows(
        selection, Value("", DType.INT64, (1, ROWS)), 1, (0,), places
    )


def _known_many(use: Use, mask: str, extent: int, count: int, below: int) -> None:
    """The places of as many true elements as the file says: the experts that its example ran. Where
    tensors of no more rows are read there, they are all of these rows.
    """
    write = use.write
    places = write.numbers(range(count))
    if count < min(below, extent):
        places = write.node("Gather", [write.in_order(mask, extent), places])
    write.reshape(places, (1, count), use.node.output[0])


def _split_into(name: str, uses: Uses) -> int:
    """How many places a Split takes apart, one each: a loop over them, as traced. 0 where there is
    none.
    """
    found = _readers(name, uses, _HANDED_ON)
    counts = {
        len(node.output) for node, _ in found if node.op_type == "Split" and len(node.output) > 1
    }
    return counts.pop() if len(counts) == 1 and len(found) == 1 else 0


def _below(name: str, uses: Uses, types: Mapping[str, Value]) -> int:
    """A number that all places are below, since tensors of that extent are read at them."""
    extents = [1 << 62]
    for node, slot in _readers(name, uses, _TAKEN_APART):
        data = types.get(node.input[0])
        if node.op_type == "Gather" and slot == 1 and data is not None:
            axis = next((int(each.i) for each in node.attribute if each.name == "axis"), 0)
            extents.append(data.shape[axis])
    return min(extents)


def _readers(name: str, uses: Uses, through: frozenset[str]) -> list[tuple[onnx.NodeProto, int]]:
    """Who reads a value, seen through what operators `through` make of their first operand."""
    found = []
    waiting = [name]
    while waiting:
        for node, slot in uses.readers.get(waiting.pop(), ()):
            if node.op_type in through and slot == 0:
                waiting += node.output
            else:
                found.append((node, slot))
    return found


def _compress(use: Use, data: Value, masks: Masks) -> None:
    write = use.write
    name = data.name
    shape = data.shape
    axis = positive(use.attribute("axis"), len(shape))
    if not use.has("axis"):
        shape = (data.elements,)
        name = write.reshape(name, shape)
    (count,) = use.types[use.operands[1]].shape
    mask = use.operands[1]
    root = masks.root(mask, use.types, use.arrays)
    if count < shape[axis]:
        name = write.sliced(name, axis, 0, count)
    elif count > shape[axis]:
        count = shape[axis]
        mask = root = write.sliced(mask, 0, 0, count)
    selection = selection_of(use, mask, (count,), (count,), root)
    type_ = Value("", data.dtype, (*shape[:axis], ROWS, *shape[axis + 1 :]))
    use.found[use.node.output[0]] = Rows(selection, type_, axis, (0,), name)


def _suppress(use: Use) -> None:
    """Rows [image, class, box]: all classes may keep as many boxes as the file lets them."""
    write = use.write
    most = (*use.numbers(), None)[2]
    named = (*use.operands, "")[2]
    boxes, scores = _boxes(use)
    count = scores.shape[-1]
    if named and most is not None:
        count = min(count, int(most.reshape(-1)[0]))
    if not named or count < 1:
        raise ModelError(
            "it may keep no box: its third operand is how many of a class", where=use.where
        )
    overlap, least = (*use.operands, "", "")[3:5]
    if use.held[1] is not None and not least:
        least = write.number(float(np.finfo(np.float32).min), DType.FLOAT32)
    operands = [boxes.name, scores.name, overlap, least]
    form = use.attribute("center_point_box")
    numbers = write.node(
        "NonMaxSuppression", operands, domain="autopipe", most=count, center_point_box=form
    )
    mask = write.node("Not", [write.node("Less", [numbers, write.number(0, DType.INT64)])])
    zero = np.zeros((1, 2), int)
    if most is None:
        steps = write.node("Range", [write.number(each, DType.INT64) for each in (0, count, 1)])
        mask = write.node("And", [mask, write.node("Less", [steps, named])])
    shape = (*scores.shape[:2], count)
    selection = selection_of(use, mask, shape, shape)
    terms = (zero, np.array([[1, 0]]), np.array([[0, 1]]), zero, zero)
    first = as_rows(write, Places(selection, Value("", DType.INT64, (ROWS, 2)), 0, terms))
    columns = [
        write.placed(first, selection.axes).value,
        write.reshape(numbers, (selection.extent(selection.axes), 1)),
    ]
    type_ = Value("", DType.INT64, (ROWS, 3))
    rows = write.node("Concat", columns, axis=1)
    use.found[use.node.output[0]] = Rows(selection, type_, 0, selection.axes, rows)


def _boxes(use: Use) -> tuple[Value, Value]:
    """Boxes and their scores. Of chosen ones those that are chosen stand in front; all others have
    no score.
    """
    boxes, scores = use.held[:2]
    if boxes is None and scores is None:
        return use.types[use.operands[0]], use.types[use.operands[1]]
    if (
        not isinstance(boxes, Rows)
        or not isinstance(scores, Rows)
        or (boxes.axis, scores.axis) != (1, 2)
    ):
        raise use.refused()
    if boxes.selection.key != scores.selection.key:
        raise use.refused()
    every = boxes.selection.axes, scores.selection.axes
    kept = use.write.filled(boxes, 0.0, every[0]), use.write.filled(scores, -math.inf, every[1])
    return use.write.packed(kept[0]), use.write.packed(kept[1])


def _unique(use: Use, data: Value) -> None:
    """Sorted, equal elements are neighbours; the first of each is chosen."""
    if use.has("axis") or not use.attribute("sorted", 1):
        raise ModelError("Unique is supported sorted and without an axis", where=use.where)
    write = use.write
    count = data.elements
    names = (*use.node.output, "", "", "")[:4]
    values, places = write.sorted(write.reshape(data.name, (count,)), count)
    equal = write.node(
        "Equal", [write.sliced(values, 0, 1, count), write.sliced(values, 0, 0, count - 1)]
    )
    mask = write.node(
        "Concat", [write.cast(write.numbers([1]), DType.BOOL), write.node("Not", [equal])], axis=0
    )
    selection = selection_of(use, mask, (count,), (count,))
    zeros = write.expand(write.numbers([0]), (1,), (count,))
    one = write.number(1, DType.INT64)
    order = write.node("CumSum", [write.cast(mask, DType.INT64), write.number(0, DType.INT64)])
    rank = write.node("Sub", [order, one])
    if names[2]:
        write.node("ScatterElements", [zeros, places, rank], names[2], axis=0)
    found = {names[0]: values}
    if names[1]:
        most = write.node("Add", [zeros, write.number(count, DType.INT64)])
        first = write.node("ScatterElements", [most, rank, places], axis=0, reduction="min")
        found[names[1]] = write.node("Gather", [first, rank])
    if names[3]:
        ones = write.node("Add", [zeros, one])
        runs = write.node("ScatterElements", [zeros, rank, ones], axis=0, reduction="add")
        found[names[3]] = write.node("Gather", [runs, rank])
    for name, value in found.items():
        dtype = data.dtype if value == values else DType.INT64
        use.found[name] = Rows(selection, Value("", dtype, (ROWS,)), 0, (0,), value)
    use.found.pop("", None)
