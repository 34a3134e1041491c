"""Laws (functions that write a node with static shapes) of operators that combine selected rows
(rows whose mask element is true): reductions, softmax, matmuls, losses, and TopK.

Rows that are not selected are filled with the operator's neutral element, so that the result is
that of the selected rows. The order of the selected rows is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops import OPERATORS, operators_with
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Indices,
    SelectedRows,
    have_counted_size,
    replace_size,
    row_type_of,
)
from autopipe.passes.frontend.dynamic_shapes.indices import representable_number, to_selected_rows
from autopipe.passes.frontend.dynamic_shapes.node_context import SHAPE_OPERANDS, NodeContext
from autopipe.passes.frontend.dynamic_shapes.prefixes import limited_root
from autopipe.passes.frontend.dynamic_shapes.size_operators import write_numbers
from autopipe.passes.frontend.dynamic_shapes.sizes import SizeArray

NEUTRAL_ELEMENTS = {name: row.neutral for name, row in OPERATORS.items() if row.neutral is not None}
"""By operator, the element that changes no result; rows that are not selected are filled with it.
"""
LOSSES = operators_with(lambda row: row.loss)
_RETURN_ROWS = frozenset({"CumSum", "LogSoftmax", "Softmax"})
"""Operators whose result has a row for each row of the operand."""
_RETURN_POSITIONS = frozenset({"ArgMax", "ArgMin"})
"""Operators whose result is the position of an element."""
_IGNORED_LABEL = -100
"""Label that marks rows that are not selected, for a loss without the attribute `ignore_index`."""


def reduce_rows(context: NodeContext) -> bool:
    """Write an operator that combines selected rows (rows whose mask element is true). It combines
    the rows of all elements of the mask; rows that are not selected get the operator's neutral
    element, or, in a loss, a label that is ignored. Return True.

    Raises ModelError in these cases:

    - The operator has no neutral element and is no loss.
    - An operand has two dimensions of selected rows.
    - The result has no dimension of rows, but another size of it depends on the number of selected
      rows.
    """
    operator = context.node.op_type
    write = context.write
    types = context.row_axes().types
    rows = {
        slot: to_selected_rows(write, each)
        for slot, each in enumerate(context.facts)
        if isinstance(each, Indices | SelectedRows)
    }
    if any(each.pair_axis is not None for each in rows.values()):
        raise context.unsupported_error()
    if operator not in NEUTRAL_ELEMENTS.keys() | LOSSES:
        raise context.unsupported_error()
    if operator not in _RETURN_ROWS and have_counted_size(types):
        raise context.unsupported_error()
    first = next(iter(rows.values()))
    result = context.node.output[0]
    selection = first.selection
    names = list(context.operands)
    for slot, each in rows.items():
        full = write.spread(write.apply_weights(each), selection.axes)
        if operator in NEUTRAL_ELEMENTS:
            full = write.fill_unselected(full, _neutral_element(operator, each.row_type.dtype))
        elif slot == 1:
            full = write.fill_unselected(full, context.integer("ignore_index", _IGNORED_LABEL))
        names[slot] = full.value
    replace_counted_operands(context, names, selection.capacity)
    if operator in _RETURN_ROWS:
        context.results[result] = SelectedRows(
            selection, first.row_type, first.axis, selection.axes, f"{result}/rows"
        )
    is_intermediate = operator in _RETURN_ROWS | _RETURN_POSITIONS or operator == "ReduceMean"
    added = {}
    if operator in LOSSES and not context.has_attribute("ignore_index"):
        added = {"ignore_index": _IGNORED_LABEL}
    results = [f"{result}/rows"] if is_intermediate else context.node.output
    write.rewrite_node(names, results, **added)
    if operator in _RETURN_POSITIONS:
        write.node("Gather", [write.ranks(selection), f"{result}/rows"], result, axis=0)
    if operator == "ReduceMean":
        _correct_mean(context, first, f"{result}/rows", result)
    return True


def _correct_mean(context: NodeContext, rows: SelectedRows, mean: str, result: str) -> None:
    """Write `result`, the mean of the n selected rows: `mean` times capacity / n. `mean` is over
    all elements of the mask (capacity), with zeros for those that are not selected. For n = 0 the
    result is 0, as in ONNX Runtime.
    """
    write = context.write
    dtype = rows.row_type.dtype
    count = write.node("Max", [write.count_selected(rows.selection), write.scalar(1, DType.INT64)])
    selected = write.cast(count, dtype)
    ratio = write.node("Div", [write.scalar(rows.selection.capacity, dtype), selected])
    write.node("Mul", [mean, ratio], result)


def fill_pairs(
    context: NodeContext, rows: Mapping[int, SelectedRows], reduced_axes: tuple[int | None, ...]
) -> dict[int, SelectedRows]:
    """Return the operands `rows` of a node, by operand index, with neutral elements where the mask
    is false.

    The operands have two dimensions that count selected rows, and the node combines elements along
    one of them: `reduced_axes` has that dimension for each operand, None for an operand without it.
    Raises ModelError for operators without neutral element, ReduceMean, and operators that return
    positions.
    """
    operator = context.node.op_type
    write = context.write
    found = dict(rows)
    has_position = operator in _RETURN_POSITIONS or operator == "ReduceMean"
    if operator not in NEUTRAL_ELEMENTS or has_position:
        raise context.unsupported_error()
    for slot, each in rows.items():
        number = _neutral_element(operator, each.row_type.dtype)
        if reduced_axes[slot] == each.axis:
            found[slot] = write.fill_unselected(each, number, each.selection.axes)
        elif reduced_axes[slot] is not None:
            found[slot] = write.fill_unselected_pairs(each, number)
    return found


def _neutral_element(operator: str, dtype: DType) -> float:
    """Return the element of the type `dtype` that does not change the operator's result. For
    softmax it is finite, so that a softmax over no selected row is not NaN.
    """
    if operator in ("LogSoftmax", "Softmax"):
        return -1e4 if dtype is DType.FLOAT16 else -1e30
    return representable_number(NEUTRAL_ELEMENTS[operator], dtype)


def sort_rows(context: NodeContext) -> bool:
    """Write a TopK along the dimension that counts selected rows (rows whose mask element is true).
    Its k may be a known number, n (the number of selected rows), or min(n, a known number). Return
    False for a TopK along another dimension.
    """
    fact = context.fact(0)
    limit = context.fact(1)
    if not isinstance(fact, Indices | SelectedRows):
        return False
    if fact.axis != nonnegative_axis(context.integer("axis", -1), len(fact.row_type.shape)):
        return False
    write = context.write
    k = context.operand_number(1)
    rows = to_selected_rows(write, fact)
    capacity = rows.selection.capacity
    kept = None
    if isinstance(limit, CountedNumbers):
        if limit.numbers.elements() != [(0, 1)]:
            raise context.unsupported_error()
        kept = limit.selection
        returns_all = kept.key == rows.selection.key
        if not returns_all and kept.root != limited_root(rows.selection, kept.shape[0]):
            raise context.unsupported_error()
        count = capacity if returns_all else kept.shape[0]
    elif k is None or isinstance(k, SizeArray) or k.size != 1:
        raise context.unsupported_error()
    else:
        returns_all = False
        count = int(k.reshape(-1)[0])
    if count > capacity:
        raise context.unsupported_error()
    fill = -math.inf if context.integer("largest", 1) else math.inf
    neutral = representable_number(fill, rows.row_type.dtype)
    packed = write.pack(write.fill_unselected(rows, neutral, rows.selection.axes))
    results = (*context.node.output, "")[:2]
    if kept is None:
        write.rewrite_node([packed.name, write.vector([count])], results)
        return True
    names = [f"{name}/rows" if name else "" for name in results]
    write.rewrite_node([packed.name, write.vector([count])], names)
    for result, name, dtype in zip(results, names, (packed.dtype, DType.INT64), strict=True):
        if not result:
            continue
        value = Value(name, dtype, replace_size(packed.shape, rows.axis, count))
        if returns_all:
            context.results[result] = write.unpack(rows.selection, value, rows.axis)
        else:
            context.results[result] = SelectedRows(
                kept, row_type_of(value, rows.axis), rows.axis, kept.axes, name
            )
    return True


def replace_counted_operands(context: NodeContext, names: list[str], count: int) -> None:
    """Replace, in `names`, the operands of the node that depend on n, the number of rows that data
    select. A size becomes its number for n = `count`, the number of rows that the graph stores.
    Another operand is computed while running, from the actual n.
    """
    sizes = SHAPE_OPERANDS.get(context.node.op_type, ())
    for slot, fact in enumerate(context.facts):
        if not isinstance(fact, CountedNumbers):
            continue
        if slot in sizes:
            numbers = fact.numbers.value_at(count)
            flat = context.write.vector(numbers.reshape(-1).tolist())
            names[slot] = context.write.reshape(flat, numbers.shape)
        else:
            names[slot] = write_numbers(context, names[slot], fact)
