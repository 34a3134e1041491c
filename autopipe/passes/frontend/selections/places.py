"""Places that a mask gives (`NonZero`), and what they take and put: reading and writing there by
reshaping.

A place is a sum of the mask's coordinates, each times a number: exporters flatten indices, so that
a token and its rank among the experts become `token * 2 + rank`. A tensor that is read at such
places for all elements of the mask is the tensor itself with its dimensions in another order, and
one that is written there likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.selections.rows import Rows, Selection, Writer


@dataclass(frozen=True, slots=True)
class Places:
    """Whole numbers with a row for each chosen element, sums of its coordinates: `terms[0]` and,
    for each axis of the mask, the coordinate along it times its number in `terms[1:]`, whose last
    is that of the element's rank among the chosen. Each has the value's shape, 1 along `axis`.
    """

    selection: Selection
    type: Value
    axis: int
    terms: tuple[np.ndarray, ...]

    def columns(self, last: bool) -> tuple[tuple[int, ...], ...] | None:
        """The terms of each number along the last dimension (of the only one, unless `last`); None
        where they differ along others.
        """
        if last and self.axis == len(self.type.shape) - 1:
            return None
        flat = [term.reshape(-1, term.shape[-1] if last else 1) for term in self.terms]
        if any((term != term[:1]).any() for term in flat):
            return None
        return tuple(zip(*(term[0].tolist() for term in flat), strict=True))


def as_rows(write: Writer, places: Places) -> Rows:
    """The numbers themselves."""
    selection = places.selection
    dtype = places.type.dtype
    over = tuple(axis for axis in selection.axes if places.terms[1 + axis].any())
    count = selection.extent(over)
    rank = len(places.type.shape)
    total = _held(write, places.terms[0], dtype)
    for axis in over:
        extent = selection.shape[axis]
        bounds = (write.number(each, DType.INT64) for each in (0, extent, 1))
        along = tuple(selection.shape[each] if each == axis else 1 for each in over)
        steps = write.reshape(write.node("Range", [*bounds]), along)
        wide = write.expand(steps, along, [selection.shape[each] for each in over])
        line = write.reshape(wide, [count if each == places.axis else 1 for each in range(rank)])
        factor = _held(write, places.terms[1 + axis], dtype)
        total = write.node("Add", [total, write.node("Mul", [write.cast(line, dtype), factor])])
    if not places.terms[-1].any():
        return Rows(selection, places.type, places.axis, over, total)
    count = math.prod(selection.shape)
    steps = write.node("Range", [write.number(each, DType.INT64) for each in (0, count, 1)])
    ranks = write.reshape(
        write.ranked(selection, steps, (count,), 0),
        [count if axis == places.axis else 1 for axis in range(rank)],
    )
    ranked = write.node("Mul", [write.cast(ranks, dtype), _held(write, places.terms[-1], dtype)])
    whole = write.placed(Rows(selection, places.type, places.axis, over, total), selection.axes)
    return replace(whole, value=write.node("Add", [whole.value, ranked]))


def _held(write: Writer, term: np.ndarray, dtype: DType) -> str:
    return write.cast(write.reshape(write.numbers(term.reshape(-1).tolist()), term.shape), dtype)


def _axes(column: tuple[int, ...], extent: int, selection: Selection) -> tuple[int, ...] | None:
    """The mask's axes of which a dimension of this extent is made, outer to inner, for the places
    of a column to be its elements, from `column[0]` on; None where they are not.
    """
    if column[-1]:
        return None
    axes = sorted(
        (axis for axis in selection.axes if column[1 + axis]), key=lambda axis: -column[1 + axis]
    )
    step = 1
    for axis in reversed(axes):
        if column[1 + axis] != step:
            return None
        step *= selection.shape[axis]
    return tuple(axes) if 0 <= column[0] <= extent - step else None


def taken(
    write: Writer, selection: Selection, columns: Sequence[tuple[int, ...]], data: Value, first: int
) -> tuple[str, tuple[int, ...]] | None:
    """The data's elements at these places, of dimensions from `first` on, which become one of the
    rows, along the mask's axes in the result; None where they are not the data in another order.
    """
    made = [
        _axes(column, data.shape[first + place], selection) for place, column in enumerate(columns)
    ]
    order = [axis for axes in made for axis in axes or ()]
    if None in made or len(set(order)) < len(order):
        return None
    name = data.name
    for place, (column, axes) in enumerate(zip(columns, made, strict=True)):
        extent = selection.extent(axes or ())
        if extent != data.shape[first + place]:
            name = write.sliced(name, first + place, column[0], column[0] + extent)
    before = data.shape[:first]
    after = data.shape[first + len(columns) :]
    parts = [selection.shape[axis] for axis in order]
    apart = write.reshape(name, (*before, *parts, *after))
    inner = [first + place for place in np.argsort(order).tolist()]
    rest = range(first + len(order), first + len(order) + len(after))
    sorted_ = write.transpose(apart, [*range(first), *inner, *rest])
    return write.reshape(sorted_, (*before, math.prod(parts), *after)), tuple(sorted(order))


def taken_of_itself(write: Writer, data: Rows, places: Places) -> str:
    """The elements of each row at known places, where GatherND's first number is the row's own
    rank; "" where it is another.
    """
    own = (
        places.terms[-1] == ([1] + [0] * (places.type.shape[-1] - 1))
    ).all() and not places.terms[0][..., 0].any()
    if data.axis or places.axis or not own or any(term.any() for term in places.terms[1:-1]):
        return ""
    known = places.terms[0][..., 1:]
    wide = (data.shape[0], *known.shape[1:])
    at = write.reshape(write.numbers(known.reshape(-1).tolist()), known.shape)
    return write.node("GatherND", [data.value, write.expand(at, known.shape, wide)], batch_dims=1)


def put(
    write: Writer,
    rows: Rows,
    columns: Sequence[tuple[int, ...]],
    data: Value,
    first: int,
    add: bool,
    result: str,
) -> bool:
    """Write the data with rows put (or added) at these places, which must be all of some dimensions
    from `first` on. False, with nothing written, where they are not.
    """
    selection = rows.selection
    made = [
        _axes(column, data.shape[first + place], selection) for place, column in enumerate(columns)
    ]
    order = [axis for axes in made for axis in axes or ()]
    extents = [selection.extent(axes or ()) for axes in made]
    if (
        None in made
        or len(set(order)) < len(order)
        or extents != [*data.shape[first : first + len(columns)]]
    ):
        return False
    over = tuple(sorted(order))
    before = data.shape[:first]
    after = data.shape[first + len(columns) :]
    apart = (*before, *(selection.shape[axis] for axis in order), *after)
    ranks = len(before), len(order), len(after)
    inwards = [*(ranks[0] + place for place in np.argsort(order).tolist()), *range(ranks[0])]
    inwards += range(ranks[0] + ranks[1], sum(ranks))
    base = write.transpose(write.reshape(data.name, apart), inwards)
    there, values = _met(write, rows, over, (*before, *after))
    nothing = write.number(0, data.dtype)
    placed = write.node("Where", [there, values, nothing if add else base])
    whole = write.node("Add", [base, placed]) if add else placed
    write.reshape(write.transpose(whole, np.argsort(inwards).tolist()), data.shape, result)
    return True


def _met(
    write: Writer, rows: Rows, over: tuple[int, ...], rest: tuple[int, ...]
) -> tuple[str, str]:
    """For each place along the mask's axes `over` whether any row goes there, and the sum of those
    that do (where none does, anything), both as [places …, `rest` …] or broadcast to that.
    """
    selection = rows.selection
    ones = [1] * len(rest)
    mask, held = write.chosen(selection, over)
    there = write.reshape(mask, [*(held[axis] for axis in over), *ones])
    counts = any(selection.shape[axis] > 1 for axis in selection.axes if axis not in over)
    if not set(rows.over) <= set(over):
        rows = write.filled(rows, 0, selection.axes)
        values = _summed(write, _in_front(write, rows, rest), [*selection.shape], over, rest)
        return there, values
    narrow = [selection.shape[axis] if axis in rows.over else 1 for axis in over]
    values = write.reshape(_in_front(write, replace(rows, weight=""), rest), [*narrow, *rest])
    if not rows.weight and not counts:
        return there, values
    wide = write.expand(selection.mask, selection.held, selection.shape)
    weight = write.cast(wide, rows.type.dtype)
    if rows.weight:
        line = write.reshape(rows.weight, selection.spread(rows.weighed))
        weight = write.node("Where", [wide, line, write.number(0, rows.type.dtype)])
    share = _summed(write, weight, [*selection.shape], over, ())
    share = write.reshape(share, [*(selection.shape[axis] for axis in over), *ones])
    return there, write.node("Mul", [values, share])


def _in_front(write: Writer, rows: Rows, rest: tuple[int, ...]) -> str:
    """The rows as [places, `rest` …]."""
    order = [rows.axis, *(axis for axis in range(len(rows.shape)) if axis != rows.axis)]
    return write.reshape(write.transpose(rows.value, order), (rows.shape[rows.axis], *rest))


def _summed(
    write: Writer, value: str, shape: list[int], over: Sequence[int], rest: tuple[int, ...]
) -> str:
    """Of [places of all axes] the sum along those that `over` does not have: [places along `over`
    …, `rest` …].
    """
    others = [axis for axis in range(len(shape)) if axis not in over]
    apart = write.reshape(value, (*shape, *rest))
    total = write.summed(apart, others) if others else apart
    return write.reshape(total, (*(shape[axis] for axis in over), *rest))


def scattered(
    write: Writer,
    operator: str,
    data: Value,
    places: Rows,
    rows: Rows,
    axis: int,
    mode: str,
    result: str,
) -> None:
    """ScatterND or ScatterElements along `axis` with places that only running tells: rows that are
    not chosen go to a place behind the data's last, or are what changes nothing where they are
    added or compared.
    """
    selection = rows.selection
    extent = data.shape[axis]
    rows = write.placed(write.whole(rows), selection.axes)
    reduces = mode != "none"
    if reduces:
        rows = write.filled(rows, nothing_for(_NEUTRAL[mode], data.dtype))
    places = (
        write.filled(places, 0, selection.axes)
        if reduces
        else _away(write, operator, places, extent)
    )
    target = data.name
    if not reduces:
        target = write.node("Concat", [target, write.sliced(target, axis, 0, 1)], axis=axis)
    attributes: dict[str, str | int] = {"reduction": mode} if reduces else {}
    if operator == "ScatterElements":
        attributes["axis"] = axis
    whole = write.node(
        operator, [target, places.value, rows.value], result if reduces else "", **attributes
    )
    if not reduces:
        write.sliced(whole, axis, 0, extent, result)


_NEUTRAL = {"add": 0.0, "max": -math.inf, "min": math.inf, "mul": 1.0}
MODES = frozenset({"none", *_NEUTRAL})
"""Words for what happens to elements that are written several times."""


def nothing_for(number: float, dtype: DType) -> float:
    """The number, or of those that a type of whole numbers has the nearest."""
    if math.isinf(number) and dtype.is_integer:
        bounds = np.iinfo(dtype.value)
        return int(bounds.max if number > 0 else bounds.min)
    return number


def _away(write: Writer, operator: str, places: Rows, extent: int) -> Rows:
    """The places, `extent` for what is not chosen; of ScatterND's, whose last dimension lists them,
    the first.
    """
    places = write.placed(write.whole(places), places.selection.axes)
    depth = places.type.shape[-1] if operator == "ScatterND" else 1
    if depth == 1:
        return write.filled(places, extent)
    outside = write.reshape(
        write.numbers([extent, *[0] * (depth - 1)]), [1] * (len(places.shape) - 1) + [depth]
    )
    mask, held = write.chosen(places.selection, places.selection.axes)
    flat = write.reshape(
        write.expand(mask, held, places.selection.shape),
        (places.shape[places.axis], *[1] * (len(places.shape) - places.axis - 1)),
    )
    kept = write.node("Where", [flat, places.value, write.cast(outside, places.type.dtype)])
    return replace(places, value=kept)
