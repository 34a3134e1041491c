"""Numbers of rows that data chooses: shapes made of them, and values cut to or spread over as many
rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.masks import Masks
from autopipe.passes.frontend.selections.neighbours import at_most, first_of, in_parts
from autopipe.passes.frontend.selections.places import Places, as_rows
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection
from autopipe.passes.frontend.selections.use import OTHER_ROWS, Counted, Use, selection_of

_SHAPED = """
    Add Cast Concat Div Equal Gather Greater Identity Less Max Min Mul Not ReduceMax ReduceMin ReduceProd ReduceSum
    Reshape ScatterElements Slice Split Squeeze Sub Transpose Unsqueeze Where
"""
OF_SHAPES = frozenset(_SHAPED.split())
"""Operators of which exporters make shapes."""
FEWEST = frozenset({"Min", "ReduceMin"})
"""Operators that bound them."""
_WHOLE = (6, 7)
"""Types of shapes, as ONNX counts them: int32 and int64."""
_MOST_NUMBERS = 1 << 16
"""Numbers of a known value that are spread as such."""


def measure(use: Use) -> None:
    """Shape and Size."""
    (held,) = use.held
    assert held is not None
    shape = held.numbers[0].shape if isinstance(held, Counted) else held.type.shape
    if isinstance(held, Rows):
        shape = held.told.shape
    start = use.attribute("start")
    end = use.attribute("end", len(shape))
    found = []
    selection, *counts = in_parts(use, held.selection)
    for count in counts:
        extents = np.asarray(
            [count * (each // ROWS) if each % ROWS == 0 else each for each in shape], np.int64
        )
        found.append(
            extents[start:end] if use.node.op_type == "Shape" else np.asarray(extents.prod())
        )
    _note(use, use.node.output[0], selection, found[0], found[1])


def _note(use: Use, name: str, selection: Selection, first: np.ndarray, second: np.ndarray) -> None:
    """Numbers of a value: known ones if they do not depend on how many rows there are."""
    if np.array_equal(first, second):
        flat = use.write.numbers(first.reshape(-1).astype(np.int64).tolist())
        use.write.cast(use.write.reshape(flat, first.shape), DType(first.dtype.name), name)
    else:
        use.found[name] = Counted(selection, (first, second))


def compute_count(use: Use) -> None:
    """A node that reads numbers of rows and nothing else that depends on them."""
    known = use.numbers()
    operator = use.node.op_type
    selection = next(each.selection for each in use.held if each is not None)
    complete = all(
        array is not None for name, array in zip(use.operands, known, strict=True) if name
    )
    if operator in ("Expand", "ConstantOfShape"):
        _spread(use, known[-1], selection)
    elif (
        operator == "Reshape" and known[0] is None and known[1] is not None and use.held[0] is None
    ):
        _demand(use, known[1])
    elif complete and (_numbers(use, selection) or _fewest(use, selection)):
        return
    elif (
        complete and operator in OF_SHAPES and (operator != "Cast" or use.attribute("to") in _WHOLE)
    ):
        first, second = (
            use.inference.evaluate(use.node, tuple(use.numbers(version)), ()) for version in (0, 1)
        )
        if first is None or second is None:
            raise use.refused()
        for name, *numbers in zip(use.node.output, first, second, strict=True):
            _note(use, name, selection, *numbers)
    else:
        read = zip(use.operands, use.held, strict=True)
        names = [
            at_run_time(use, name, each) if isinstance(each, Counted) else name
            for name, each in read
        ]
        use.write.again(names, use.node.output)


def _fewest(use: Use, selection: Selection) -> bool:
    """How many are chosen, but at most a number: how many the first of the chosen are. False for
    another node.
    """
    if use.node.op_type not in FEWEST:
        return False
    told = [use.numbers(version)[: None if use.node.op_type == "Min" else 1] for version in (0, 1)]
    first, second = (
        [int(each) for array in arrays if array is not None for each in array.flat]
        for arrays in told
    )
    pairs = set(zip(first, second, strict=True))
    fixed = [one for one, other in pairs if one == other]
    results = use.evaluated(use.numbers(), ())
    if (
        results is None
        or results[0].size != 1
        or pairs - {(each, each) for each in fixed} != {(ROWS, OTHER_ROWS)}
    ):
        return False
    most = min(fixed, default=ROWS)
    total = math.prod(selection.shape)
    if most < 1:
        return False
    if most < total:
        selection = at_most(use, selection, most)
    shape = results[0].shape
    use.found[use.node.output[0]] = Counted(
        selection, (np.full(shape, ROWS), np.full(shape, OTHER_ROWS))
    )
    return True


def _demand(use: Use, wanted: np.ndarray) -> None:
    """A static value in a shape with one row for each chosen element: there must be as many as make
    up the value.
    """
    others = math.prod(extent for extent in wanted.tolist() if extent != ROWS)
    count, rest = divmod(use.types[use.operands[0]].elements, others)
    if rest or wanted.tolist().count(ROWS) != 1 or others < 1:
        raise use.refused()
    shape = use.write.numbers(np.where(wanted == ROWS, count, wanted).tolist())
    use.write.again([use.operands[0], shape], use.node.output)


def at_run_time(use: Use, name: str, counted: Counted) -> str:
    """The numbers, computed from how many elements are chosen, on which they depend linearly."""
    first, second = counted.numbers
    if first.dtype.kind == "f":  # They are in the graph already.
        return name
    slope, uneven = np.divmod(second.astype(np.int64) - first, OTHER_ROWS - ROWS)
    if uneven.any() or first.dtype.kind != "i":
        raise use.refused()
    write = use.write
    offset = first - slope * ROWS
    factor, rest = (
        write.reshape(write.numbers(each.reshape(-1).tolist()), each.shape)
        for each in (slope, offset)
    )
    total = write.node("Add", [write.node("Mul", [write.counted(counted.selection), factor]), rest])
    return write.cast(total, DType(first.dtype.name))


def _spread(use: Use, wanted: np.ndarray | None, selection: Selection) -> None:
    """A value that is the same for each row."""
    write = use.write
    name = use.node.output[0]
    operand = use.operands[0] if use.node.op_type == "Expand" else ""
    if wanted is None or (operand and operand not in use.types):
        raise use.refused()
    shape = tuple(wanted.reshape(-1).tolist())
    if operand:
        shape = tuple(np.broadcast_shapes(shape, use.types[operand].shape))
    if shape.count(ROWS) != 1 or max(shape) > ROWS:
        raise use.refused()
    axis = shape.index(ROWS)
    real = (*shape[:axis], 1, *shape[axis + 1 :])
    array = use.arrays.get(operand)
    if (
        operand
        and array is not None
        and array.dtype.kind == "i"
        and math.prod(real) <= _MOST_NUMBERS
    ):
        terms = (
            np.broadcast_to(array, real),
            *[np.zeros(real, array.dtype)] * (len(selection.shape) + 1),
        )
        use.found[name] = Places(selection, Value("", use.types[operand].dtype, shape), axis, terms)
        return
    value = f"{name}/rows"
    write.again([*([operand] if operand else []), write.numbers(real)], [value])
    dtype = use.types[operand].dtype if operand else _constant_type(use)
    use.found[name] = Rows(selection, Value("", dtype, shape), axis, (), value)


def _constant_type(use: Use) -> DType:
    shape = Value("", DType.INT64, (1,))
    (told,) = use.inference.types(use.node, ((shape, np.ones(1, np.int64)),))
    if told is None:
        raise use.refused()
    return told.dtype


def _numbers(use: Use, selection: Selection) -> bool:
    """A Range over the rows, or over the first of as many; False for another node."""
    if use.node.op_type != "Range":
        return False
    start, end, step = (each.tolist() for each in use.numbers() if each is not None)
    other = use.numbers(1)[1]
    if (start, step) != (0, 1) or other is None:
        return False
    if end != ROWS and selection.first is not None:
        scale, rest = divmod(int(other) - int(end), OTHER_ROWS - ROWS)
        if rest or scale < 1:
            return False
        selection = first_of(use, selection, scale, int(end) - scale * ROWS)
        end = ROWS
    if end != ROWS:
        return False
    number(use, selection)
    return True


def number(use: Use, selection: Selection) -> None:
    """The rows counted from 0 on."""
    column = 1 if selection.first is not None else len(selection.shape) + 1
    terms = np.eye(1, len(selection.shape) + 2, column, np.int64).T
    places = Places(selection, Value("", DType.INT64, (ROWS,)), 0, tuple(terms))
    kind = next(each.dtype for each in use.numbers() if each is not None).name
    name = use.node.output[0]
    if kind == "int64":
        use.found[name] = places
        return
    rows = as_rows(use.write, places)
    dtype = DType(kind)
    use.found[name] = replace(
        rows, type=replace(rows.type, dtype=dtype), value=use.write.cast(rows.value, dtype)
    )


def cuts(use: Use) -> bool:
    """True for the first elements of a value, as many as are chosen, unless it is a row for each
    that has them.
    """
    if use.node.op_type != "Slice" or len(use.held) < 3 or not isinstance(use.held[2], Counted):
        return False
    return use.held[0] is None or (
        isinstance(use.held[0], Rows) and use.held[0].selection.key != use.held[2].selection.key
    )


def cut(use: Use) -> None:
    """The first elements of a value, as many as are chosen: each chosen place has that of its
    rank.
    """
    source = use.held[0]
    end = use.held[2]
    if isinstance(source, Rows):
        data = use.write.packed(source)
    else:
        data = use.types[use.operands[0]]
    starts, axes, steps = (*use.numbers(), None, None)[1], *(*use.numbers(), None, None)[3:5]
    axis = 0 if axes is None else positive(int(axes.reshape(-1)[0]), len(data.shape))
    first = (
        starts is not None
        and not starts.any()
        and isinstance(end, Counted)
        and end.numbers[0].tolist() == [ROWS]
    )
    if (
        not first
        or (steps is not None and (steps != 1).any())
        or (isinstance(source, Rows) and source.axis != axis)
    ):
        raise use.refused()
    assert isinstance(end, Counted)
    use.found[use.node.output[0]] = use.write.unpacked(end.selection, data, axis)


def summed_mask(use: Use, masks: Masks) -> None:
    """Note of a sum of all elements of a mask that it is how many are true; nothing of other
    sums.
    """
    data = use.types.get(use.operands[0])
    axes = (*use.numbers(), None)[1]
    root = masks.root(use.operands[0], use.types, use.arrays)
    mask = use.types.get(root)
    listed = [int(each) for node in use.node.attribute if node.name == "axes" for each in node.ints]
    if axes is not None:
        listed = axes.reshape(-1).tolist()
    if (
        data is None
        or mask is None
        or mask.dtype is not DType.BOOL
        or not data.dtype.is_integer
        or not mask.shape
    ):
        return
    if (len(use.operands) > 1 and use.operands[1] and axes is None) or (
        listed and len(listed) < len(data.shape)
    ):
        return
    if not listed and use.attribute("noop_with_empty_axes"):
        return
    shape = [1] * len(data.shape) if use.attribute("keepdims", 1) else []
    selection = selection_of(use, mask.name, mask.shape, mask.shape, root)
    first, second = (np.full(shape, count, np.int64) for count in (ROWS, OTHER_ROWS))
    use.found[use.node.output[0]] = Counted(selection, (first, second))
