"""Rows that are put into a tensor, or into other rows, at places that data choose."""

from __future__ import annotations

import math
from dataclasses import replace

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.lookups import from_the_front
from autopipe.passes.frontend.selections.places import MODES, Places, as_rows, put, scattered
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection, Writer
from autopipe.passes.frontend.selections.use import Counted, Use

PUTS = frozenset({"Scatter", "ScatterElements", "ScatterND"})


def puts(use: Use) -> bool:
    """Put rows at chosen places; False where the node does not."""
    operator = use.node.op_type
    result = use.node.output[0]
    if operator not in PUTS:
        return False
    target = use.held[0]
    places = use.held[1]
    mode = next(
        (
            each.s.decode(errors="replace")
            for each in use.node.attribute
            if each.name == "reduction"
        ),
        "none",
    )
    if isinstance(target, Rows | Places):
        axis = (
            0
            if operator == "ScatterND"
            else positive(use.attribute("axis"), len(target.type.shape))
        )
        return target.axis == axis and _puts_into_rows(use, target, mode)
    if not isinstance(places, Rows | Places) or mode not in MODES:
        raise use.refused()
    _put(use, use.types[use.operands[0]], places, mode, result)
    return True


def _puts_into_rows(use: Use, target: Rows | Places, mode: str) -> bool:
    """Put numbers into chosen rows, by the number of each among the chosen."""
    write = use.write
    places = use.held[1]
    result = use.node.output[0]
    rows = as_rows(write, target) if isinstance(target, Places) else target
    if (
        isinstance(places, Counted)
        or mode not in MODES
        or (places is None and use.held[2] is not None)
    ):
        raise use.refused()
    is_nd = use.node.op_type == "ScatterND"
    own = _own_numbers(write, places, rows.selection) if is_nd and places is not None else ""
    if own and places is not None:
        wide = write.placed(write.whole(rows), rows.selection.axes)
        updates = write.placed(write.whole(_updates(use, places)), rows.selection.axes)
        attributes = {"reduction": mode} if mode != "none" else {}
        value = write.node(
            "ScatterND", [wide.value, own, updates.value], f"{result}/rows", **attributes
        )
        use.found[result] = replace(wide, value=value)
        return True
    packed = write.packed(rows)
    whole = Value(f"{result}/packed", packed.dtype, packed.shape)
    column = 0 if is_nd else None
    if places is None:
        at = from_the_front(
            use, use.operands[1], rows.selection, use.types[use.operands[1]], column
        )
        write.again([packed.name, at, use.operands[2]], [whole.name])
    else:
        there = as_rows(write, places) if isinstance(places, Places) else write.whole(places)
        at = from_the_front(use, there.value, rows.selection, there.type, column)
        _put(use, packed, replace(there, value=at), mode, whole.name)
    use.found[result] = write.unpacked(rows.selection, whole, rows.axis)
    return True


def _own_numbers(write: Writer, places: Rows | Places, selection: Selection) -> str:
    """Known places in each row, where ScatterND's first number is the row's own; "" where it is
    another.
    """
    if not isinstance(places, Places) or places.axis or places.type.shape[-1] >= ROWS:
        return ""
    own = (
        places.terms[-1] == ([1] + [0] * (places.type.shape[-1] - 1))
    ).all() and not places.terms[0][..., 0].any()
    if not own or any(term.any() for term in places.terms[1:-1]):
        return ""
    count = math.prod(selection.shape)
    known = places.terms[0]
    steps = write.node("Range", [write.number(each, DType.INT64) for each in (0, count, 1)])
    first = write.reshape(steps, (count, *[1] * (len(places.type.shape) - 1)))
    wide = (count, *known.shape[1:-1], 1)
    rest = (count, *known.shape[1:-1], known.shape[-1] - 1)
    others = write.reshape(write.numbers(known[..., 1:].reshape(-1).tolist()), known[..., 1:].shape)
    parts = [
        write.expand(first, (count, *[1] * (len(wide) - 1)), wide),
        write.expand(others, (1, *rest[1:]), rest),
    ]
    return parts[0] if not rest[-1] else write.node("Concat", parts, axis=-1)


def _put(use: Use, data: Value, places: Rows | Places, mode: str, result: str) -> None:
    """Write the data with rows put at chosen places."""
    write = use.write
    rows = _updates(use, places)
    is_nd = use.node.op_type == "ScatterND"
    axis = 0 if is_nd else positive(use.attribute("axis"), len(data.shape))
    columns = _columns(places, is_nd, data, axis) if mode in ("none", "add") else None
    if columns is not None:
        around = (*data.shape[:axis], *data.shape[axis + len(columns) :])
        fits = math.prod(rows.type.shape) == ROWS * math.prod(around)
        if fits and put(write, rows, columns, data, axis, mode == "add", result):
            return
    found = as_rows(write, places) if isinstance(places, Places) else places
    scattered(
        write, "ScatterND" if is_nd else "ScatterElements", data, found, rows, axis, mode, result
    )


def _columns(
    places: Rows | Places, is_nd: bool, data: Value, axis: int
) -> tuple[tuple[int, ...], ...] | None:
    """The places of whole rows of the data; None where those are not told by the mask's coordinates
    alone.
    """
    if not isinstance(places, Places) or is_nd:
        return places.columns(last=True) if isinstance(places, Places) else None
    rest = [extent for place, extent in enumerate(places.type.shape) if place != places.axis]
    others = [extent for place, extent in enumerate(data.shape) if place != axis]
    return places.columns(last=False) if places.axis == axis and rest == others else None


def _updates(use: Use, places: Rows | Places) -> Rows:
    """The rows that are put there, or a static value with as many."""
    rows = use.held[2]
    if isinstance(rows, Places):
        return as_rows(use.write, rows)
    if isinstance(rows, Rows):
        return rows
    if rows is not None:
        raise use.refused()
    given = use.types[use.operands[2]]
    axis = places.axis
    name = use.write.ranked(places.selection, use.operands[2], given.shape, axis)
    type_ = Value("", given.dtype, (*given.shape[:axis], ROWS, *given.shape[axis + 1 :]))
    return Rows(places.selection, type_, axis, places.selection.axes, name)
