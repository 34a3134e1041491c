"""Operators along chosen rows, to which those that are not chosen are nothing: sums, products,
losses, orders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.neighbours import most_root
from autopipe.passes.frontend.selections.places import Places, as_rows, nothing_for
from autopipe.passes.frontend.selections.rows import ROWS, Rows
from autopipe.passes.frontend.selections.use import Counted, Use, is_static

_FILLS = {
    "ArgMax": -math.inf, "ArgMin": math.inf, "CumSum": 0.0, "Einsum": 0.0, "Gemm": 0.0, "LogSoftmax": -math.inf,
    "MatMul": 0.0, "ReduceL1": 0.0, "ReduceL2": 0.0, "ReduceLogSum": 0.0, "ReduceLogSumExp": -math.inf,
    "ReduceMax": -math.inf, "ReduceMean": 0.0, "ReduceMin": math.inf, "ReduceProd": 1.0, "ReduceSum": 0.0,
    "ReduceSumSquare": 0.0, "Softmax": -math.inf,
}  # fmt: skip
"""Numbers in rows that are not chosen, so that operators along the rows pass over them."""
_LOSSES = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
_ROWS_AGAIN = frozenset({"CumSum", "LogSoftmax", "Softmax"})
_COUNTING = frozenset({"ArgMax", "ArgMin", "ReduceMean"})
_LEFT_OUT = -100
"""The label that losses leave out, where the node states none."""


def along(use: Use, rows: Mapping[int, Rows], types: list[Value]) -> None:
    """Write the node for all rows that could be chosen."""
    operator = use.node.op_type
    write = use.write
    names = list(use.operands)
    first = next(iter(rows.values()))
    result = use.node.output[0]
    if operator not in {*_FILLS, *_LOSSES} or (
        operator not in _ROWS_AGAIN and not is_static(types)
    ):
        raise use.refused()
    every = first.selection.axes
    for slot, each in rows.items():
        whole = write.placed(write.whole(each), every)
        if operator in _FILLS:
            whole = write.filled(whole, _nothing(operator, each.type.dtype))
        elif slot == 1:
            whole = write.filled(whole, use.attribute("ignore_index", _LEFT_OUT))
        names[slot] = whole.value
    count = math.prod(first.selection.shape)
    settle(use, names, count)
    if operator in _ROWS_AGAIN:
        use.found[result] = Rows(first.selection, first.type, first.axis, every, f"{result}/rows")
    later = operator in {*_ROWS_AGAIN, "ReduceMean", "ArgMax", "ArgMin"}
    write.again(names, [f"{result}/rows"] if later else use.node.output)
    if operator in _LOSSES and not use.has("ignore_index"):
        write.state("ignore_index", _LEFT_OUT)
    if operator in ("ArgMax", "ArgMin"):
        write.node("Gather", [write.ranks(first.selection), f"{result}/rows"], result, axis=0)
    if operator == "ReduceMean":  # Over all rows so far.
        dtype = first.type.dtype
        some = write.node(
            "Max", [write.counted(first.selection), write.number(1, DType.INT64)]
        )  # ORT's mean of none: 0
        chosen = write.cast(some, dtype)
        write.node(
            "Mul",
            [f"{result}/rows", write.node("Div", [write.number(count, dtype), chosen])],
            result,
        )


def across(
    use: Use, rows: Mapping[int, Rows], together: tuple[int | None, ...]
) -> Mapping[int, Rows]:
    """Of values with two dimensions of rows the operands of a node that takes those along
    `together` together.
    """
    operator = use.node.op_type
    write = use.write
    found = dict(rows)
    if operator not in _FILLS or operator in _COUNTING:
        raise use.refused()
    for slot, each in rows.items():
        number = _nothing(operator, each.type.dtype)
        if together[slot] == each.axis:
            found[slot] = write.filled(each, number, each.selection.axes)
        elif together[slot] is not None:
            found[slot] = write.filled_beside(each, number)
    return found


def _nothing(operator: str, dtype: DType) -> float:
    if operator in ("LogSoftmax", "Softmax"):  # Finite, where none is chosen.
        return -1e4 if dtype is DType.FLOAT16 else -1e30
    return nothing_for(_FILLS[operator], dtype)


def largest(use: Use) -> bool:
    """TopK along the rows: of a known number of them, of all in their new order, or of at most as
    many as a number says; False for another node.
    """
    held, wanted = (*use.held, None)[:2]
    if use.node.op_type != "TopK" or not isinstance(held, Rows | Places):
        return False
    if held.axis != positive(use.attribute("axis", -1), len(held.type.shape)):
        return False
    write = use.write
    k = use.numbers()[1]
    rows = as_rows(write, held) if isinstance(held, Places) else held
    if k is None or k.size != 1:
        raise use.refused()
    count = math.prod(rows.selection.shape)
    most = int(k.reshape(-1)[0])
    told = wanted.selection if isinstance(wanted, Counted) and most == ROWS else None
    of_all = told is not None and told.key == rows.selection.key
    if told is not None and not of_all and told.root != most_root(rows.selection, told.shape[0]):
        raise use.refused()
    if told is not None:
        most = count if of_all else told.shape[0]
    if most > count:
        raise use.refused()
    fill = nothing_for(-math.inf if use.attribute("largest", 1) else math.inf, rows.type.dtype)
    packed = write.packed(write.filled(rows, fill, rows.selection.axes))
    results = (*use.node.output, "")[:2]
    names = list(results) if told is None else [f"{name}/rows" if name else "" for name in results]
    write.again([packed.name, write.numbers([most])], names)
    for result, name, dtype in zip(results, names, (packed.dtype, DType.INT64), strict=True):
        if not result or told is None:
            continue
        value = Value(
            name, dtype, (*packed.shape[: rows.axis], most, *packed.shape[rows.axis + 1 :])
        )
        if of_all:
            use.found[result] = write.unpacked(rows.selection, value, rows.axis)
        else:
            use.found[result] = Rows(
                told, replace(rows.type, dtype=dtype), rows.axis, told.axes, name
            )
    return True


def settle(use: Use, names: list[str], count: int) -> None:
    """Replace numbers of rows among the operands by `count`."""
    for slot, (each, array) in enumerate(zip(use.held, use.numbers(), strict=True)):
        if isinstance(each, Counted) and array is not None:
            numbers = np.where(array == ROWS, count, array).reshape(-1).tolist()
            names[slot] = use.write.reshape(use.write.numbers(numbers), array.shape)
