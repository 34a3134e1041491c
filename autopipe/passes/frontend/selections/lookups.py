"""Chosen rows that are read, or written, by their number among the chosen."""

from __future__ import annotations

import math
from dataclasses import replace

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.neighbours import at_most, cut_first
from autopipe.passes.frontend.selections.places import Places, as_rows
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection
from autopipe.passes.frontend.selections.use import Counted, Use


def looked_up(use: Use) -> bool:
    """Read chosen rows by their number among the chosen; False where the node does not."""
    write = use.write
    operator = use.node.op_type
    result = use.node.output[0]
    data, at = (*use.held, None)[:2]
    if (
        operator not in ("Gather", "GatherND")
        or not isinstance(data, Rows | Places)
        or isinstance(at, Counted)
    ):
        return False
    depth = _depth(use)
    if depth is None or (data.axis != depth if operator == "Gather" else data.axis >= depth):
        return False
    rows = as_rows(write, data) if isinstance(data, Places) else data
    packed = write.packed(rows)
    places = as_rows(write, at) if isinstance(at, Places) else at
    type_ = use.types[use.operands[1]] if places is None else places.type
    name = use.operands[1]
    if places is not None:
        places = write.filled(places, 0, places.selection.axes)
        name = places.value
    column = data.axis if operator == "GatherND" else None
    name = from_the_front(use, name, rows.selection, type_, column)
    inner = packed.shape[depth:] if operator == "GatherND" else packed.shape[depth + 1 :]
    outer = () if operator == "GatherND" else packed.shape[:depth]
    found = type_.shape[:-1] if operator == "GatherND" else type_.shape
    if places is None:
        write.again([packed.name, name], [result])
        return True
    if operator == "GatherND" and places.axis == len(type_.shape) - 1:
        raise use.refused()
    value = f"{result}/rows"
    write.again([packed.name, name], [value])
    whole = Value("", packed.dtype, (*outer, *found, *inner))
    use.found[result] = Rows(places.selection, whole, len(outer) + places.axis, places.over, value)
    return True


def _depth(use: Use) -> int | None:
    """The axis that Gather reads along; how many GatherND does. None for what is not told."""
    data = use.held[0]
    assert isinstance(data, Rows | Places)
    if use.node.op_type == "Gather":
        return positive(use.attribute("axis"), len(data.type.shape))
    if use.attribute("batch_dims"):
        return None
    at = use.held[1]
    shape = at.type.shape if isinstance(at, Rows | Places) else use.types[use.operands[1]].shape
    return shape[-1] if shape and shape[-1] < ROWS else None


def from_the_front(
    use: Use, name: str, selection: Selection, type_: Value, column: int | None
) -> str:
    """Numbers of rows where those below zero count from behind the last one; of several, which
    number is the row's.
    """
    write = use.write
    known = use.arrays.get(name)
    if known is not None and (known >= 0).all():
        return name
    count = write.cast(write.counted(selection), type_.dtype)
    if column is not None:
        flags = [int(each == column) for each in range(type_.shape[-1])]
        count = write.node("Mul", [count, write.cast(write.numbers(flags), type_.dtype)])
    below = write.node("Less", [name, write.number(0, type_.dtype)])
    return write.node("Where", [below, write.node("Add", [name, count]), name])


def cuts_rows(use: Use) -> bool:
    """A Slice of rows from one known number on, before another: those among the chosen. False for
    another node.
    """
    rows = use.held[0]
    write = use.write
    if use.node.op_type != "Slice" or not isinstance(rows, Rows | Places):
        return False
    starts, ends, axes, steps = (*use.numbers()[1:], None, None)[:4]
    if starts is None or ends is None or starts.size != 1:
        return False
    step = 1 if steps is None else int(steps.reshape(-1)[0])
    if step < 1 or (step > 1 and rows.selection.first is None):
        return False
    axis = 0 if axes is None else positive(int(axes.reshape(-1)[0]), len(rows.type.shape))
    start = int(starts.reshape(-1)[0])
    end = int(ends.reshape(-1)[0])
    if axis != rows.axis or (start == 0 and end >= ROWS and step == 1):
        return False
    held = as_rows(write, rows) if isinstance(rows, Places) else rows
    if cut_first(use, held, start, end, step):
        return True
    if step > 1:
        raise use.refused()
    selection = held.selection
    if start == 0 and 0 < end < math.prod(selection.shape):
        packed = write.packed(held)
        first = at_most(use, selection, end)
        value = write.sliced(packed.name, axis, 0, end)
        use.found[use.node.output[0]] = Rows(first, held.type, axis, first.axes, value)
        return True
    rank = write.ranks(selection)
    told = write.line(selection)
    count = write.counted(selection)
    for bound, compared in ((start, "Less"), (end, "GreaterOrEqual")):
        if bound >= ROWS or (bound == 0 and compared == "Less"):
            continue
        number = write.number(bound, DType.INT64)
        limit = write.node("Add", [count, number]) if bound < 0 else number
        told = write.node("And", [told, write.node("Not", [write.node(compared, [rank, limit])])])
    use.found[use.node.output[0]] = _kept(use, held, told, f"{selection.key} {start} {end}")
    return True


def splits_rows(use: Use) -> bool:
    """A Split of rows into runs of the chosen, whose lengths may be told by running; False for
    another node.
    """
    rows = use.held[0]
    write = use.write
    if use.node.op_type != "Split" or not isinstance(rows, Rows | Places) or len(use.operands) < 2:
        return False
    if (
        rows.axis != positive(use.attribute("axis"), len(rows.type.shape))
        or use.held[1] is not None
    ):
        return False
    held = as_rows(write, rows) if isinstance(rows, Places) else rows
    selection = held.selection
    rank = write.ranks(held.selection)
    ends = write.node("CumSum", [use.operands[1], write.number(0, DType.INT64)])
    told = write.line(selection)
    for place, name in enumerate(use.node.output):
        before = write.node("Less", [rank, write.sliced(ends, 0, place, place + 1)])
        mask = write.node("And", [told, before])
        told = write.node("And", [told, write.node("Not", [before])])
        use.found[name] = _kept(use, held, mask, f"{selection.key} {use.operands[1]} {place}")
    return True


def _kept(use: Use, rows: Rows, mask: str, root: str) -> Rows:
    """The rows that a vector, with a flag for each place, keeps of those chosen."""
    write = use.write
    selection = rows.selection
    shape = selection.shape
    kept = Selection(write.reshape(mask, shape), shape, shape, use.where, root)
    return replace(write.placed(write.whole(rows), selection.axes), selection=kept)
