"""Writes nodes of static shapes, through the `FileRewriter` of the node that they replace.

A `RowWriter` converts between forms of selected rows (rows whose mask element is true): one row per
element of the mask, selected rows first, and rows that are not selected filled with a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.domain import (
    SelectedRows,
    Selection,
    replace_size,
    row_type_of,
)
from autopipe.passes.frontend.elements import NUMBERS, copy_with_names
from autopipe.passes.frontend.rewriter import (
    REDUCE_SUM_OPERANDS_SINCE,
    SLICE_OPERANDS_SINCE,
    FileRewriter,
)


class RowWriter:
    """Writes the nodes that replace one node; they have its name. New values are called
    RESULT/rows/NUMBER, where RESULT is the first result of the replaced node.
    """

    def __init__(self, rewriter: FileRewriter) -> None:
        self._rewriter = rewriter
        self._count = 0

    def node(
        self, operator: str, operands: Sequence[str], result: str = "", **attributes: Any
    ) -> str:
        """Write a node with one result and return the result's name: `result`, or a new name."""
        name = self._new_name()
        return self._add(operator, operands, [result or name], **attributes)

    def _new_name(self) -> str:
        """Return a name for a new value."""
        self._count += 1
        return f"{next(filter(None, self._rewriter.node.outputs))}/rows/{self._count}"

    def _add(
        self, operator: str, operands: Sequence[str], results: Sequence[str], **attributes: Any
    ) -> str:
        """Write a node with these results, and return the name of the first one."""
        name = self._rewriter.node.name or operator
        return self._rewriter.add(operator, operands, results=results, name=name, **attributes)

    def rewrite_node(
        self, operands: Sequence[str], results: Sequence[str], **attributes: int
    ) -> None:
        """Write the replaced node with other operands and results, and with `attributes` added."""
        import onnx.helper

        node = copy_with_names(self._rewriter.proto, operands, results)
        added = (onnx.helper.make_attribute(name, each) for name, each in attributes.items())
        node.attribute.extend(added)
        self._rewriter.copy(node)

    def _constant(self, array: np.ndarray) -> str:
        """Write a constant and return its name."""
        name = self._new_name()
        self._rewriter.scope.add_constant(Value(name, DType(array.dtype.name), array.shape), array)
        return name

    def vector(self, values: Sequence[int]) -> str:
        """Write an int64 constant with one dimension and return its name."""
        return self._constant(np.array([int(each) for each in values], np.int64))

    def scalar(self, value: float, dtype: DType) -> str:
        """Write a constant of the type `dtype` without dimensions and return its name."""
        is_whole = abs(value) < 1 << 62 and value == int(value)
        array = np.array(int(value), np.int64) if is_whole else np.array(value, np.float32)
        return self.cast(self._constant(array), dtype)

    def arange(self, count: int) -> str:
        """Write the integers from 0 to count - 1 as an int64 vector and return its name."""
        return self.node("Range", [self.scalar(each, DType.INT64) for each in (0, count, 1)])

    def cast(self, name: str, dtype: DType, result: str = "") -> str:
        """Write a conversion of the value `name` to `dtype` and return the result's name."""
        return self.node("Cast", [name], result, to=NUMBERS[dtype])

    def reshape(self, name: str, shape: Sequence[int], result: str = "") -> str:
        """Write a Reshape of the value `name` to a known shape and return the result's name."""
        return self.node("Reshape", [name, self.vector(shape)], result)

    def expand(self, name: str, shape: Sequence[int], target: Sequence[int]) -> str:
        """Write an Expand of the value `name` from `shape` to `target` and return the result's
        name; `name` if the shapes are equal.
        """
        if tuple(shape) == tuple(target):
            return name
        return self.node("Expand", [name, self.vector(target)])

    def transpose(self, name: str, order: Sequence[int]) -> str:
        """Write a Transpose of the value `name` and return the result's name; `name` if `order` is
        ascending.
        """
        if list(order) == sorted(order):
            return name
        return self.node("Transpose", [name], perm=list(order))

    def sum_over(self, name: str, axes: Sequence[int]) -> str:
        """Write the sum of the value `name` along `axes`, which stay with size 1. Return the
        result's name.
        """
        if self._rewriter.opset < REDUCE_SUM_OPERANDS_SINCE:
            return self.node("ReduceSum", [name], axes=list(axes), keepdims=1)
        return self.node("ReduceSum", [name, self.vector(axes)], keepdims=1)

    def slice(self, name: str, axis: int, start: int, end: int, result: str = "") -> str:
        """Write the elements `start` … `end` - 1 of the value `name` along one axis and return the
        result's name.
        """
        if self._rewriter.opset < SLICE_OPERANDS_SINCE:
            return self.node("Slice", [name], result, axes=[axis], starts=[start], ends=[end])
        bounds = [self.vector([each]) for each in (start, end, axis)]
        return self.node("Slice", [name, *bounds], result)

    def sort(self, name: str, count: int) -> tuple[str, str]:
        """Write the ascending sort of the vector `name` of `count` elements. Return the names of
        the sorted elements and of their former positions.
        """
        values = self._new_name()
        positions = f"{values}/places"
        operands = [name, self.vector([count])]
        self._add("TopK", operands, [values, positions], axis=0, largest=0)
        return values, positions

    def positions_selected_first(self, mask: str, count: int) -> str:
        """Write the positions of the elements of `mask`, a boolean vector of `count` elements:
        first the positions of true elements, then those of false elements, both ascending. Return
        the result's name.
        """
        is_last = self.cast(self.node("Not", [mask]), DType.INT64)
        steps = self.arange(count)
        behind = self.node("Mul", [is_last, self.scalar(count, DType.INT64)])
        return self.sort(self.node("Add", [behind, steps]), count)[1]

    def any_selected(
        self, selection: Selection, over: Sequence[int]
    ) -> tuple[str, tuple[int, ...]]:
        """Write, for each position along the mask axes `over`, whether any element of the mask with
        these coordinates is true. Return the result's name and its shape. Its size is 1 along the
        other axes, and along axes over which the mask is broadcast.
        """
        others = [
            axis for axis in selection.axes if axis not in over and selection.mask_shape[axis] > 1
        ]
        if not others:
            return selection.mask, selection.mask_shape
        count = self.sum_over(self.cast(selection.mask, DType.INT32), others)
        shape = tuple(
            1 if axis in others else extent for axis, extent in enumerate(selection.mask_shape)
        )
        return self.cast(count, DType.BOOL), shape

    def reexpress(self, rows: SelectedRows, selection: Selection) -> SelectedRows:
        """Return the rows in terms of `selection`, whose mask has the same elements, but may divide
        them into other dimensions.
        """
        former = rows.selection
        if (former.mask_shape, former.shape) == (selection.mask_shape, selection.shape):
            return replace(rows, selection=selection)
        full = self.spread(self.apply_weights(rows), former.axes)
        return replace(full, selection=selection, over=selection.axes)

    def flat_mask(self, selection: Selection) -> str:
        """Write the mask of the selection, broadcast to its full shape, as a vector. Return the
        vector's name; it has `selection.capacity` elements.
        """
        wide = self.expand(selection.mask, selection.mask_shape, selection.shape)
        return self.reshape(wide, (selection.capacity,))

    def ranks(self, selection: Selection) -> str:
        """Write, for each element of the selection's mask, the number of true elements before it,
        as an int64 vector. For a true element this is its rank. Return the vector's name.
        """
        flags = self.cast(self.flat_mask(selection), DType.INT64)
        return self.node("CumSum", [flags, self.scalar(0, DType.INT64)], exclusive=1)

    def count_selected(self, selection: Selection) -> str:
        """Write n, the number of true elements of the selection's mask, as an int64 scalar and
        return its name.
        """
        flags = self.cast(selection.mask, DType.INT64)
        total = self.reshape(self.sum_over(flags, selection.axes), ())
        repeats = selection.capacity // math.prod(selection.mask_shape)
        if repeats == 1:
            return total
        return self.node("Mul", [total, self.scalar(repeats, DType.INT64)])

    def pack(self, rows: SelectedRows) -> Value:
        """Write a tensor of the rows with those whose mask element is true first, in their order,
        and the others after them. Return the tensor's name, type and shape as a `Value`.
        """
        rows = self.spread(self.apply_weights(rows), rows.selection.axes)
        if rows.selection.first_rows is not None:
            return Value(rows.value, rows.row_type.dtype, rows.shape)
        mask, blocks, inner = self.mask_blocks(rows.selection)
        before = rows.shape[: rows.axis]
        after = rows.shape[rows.axis + 1 :]
        divided = self.reshape(rows.value, (*before, blocks, inner, *after))
        order = self.positions_selected_first(mask, blocks)
        found = self.node("Gather", [divided, order], axis=rows.axis)
        return Value(self.reshape(found, rows.shape), rows.row_type.dtype, rows.shape)

    def mask_blocks(self, selection: Selection) -> tuple[str, int, int]:
        """Write the mask without its last axes along which it is broadcast, as a vector. Return the
        vector's name, its number of elements, and the number of mask elements that each of them
        stands for.
        """
        stored = list(selection.mask_shape)
        wide = list(selection.shape)
        inner = 1
        while len(stored) > 1 and stored[-1] == 1:
            inner *= wide.pop()
            stored.pop()
        mask = self.expand(self.reshape(selection.mask, stored), stored, wide)
        return self.reshape(mask, (math.prod(wide),)), math.prod(wide), inner

    def unpack(self, selection: Selection, value: Value, axis: int) -> SelectedRows:
        """Return rows from a static value: row r of `value` along `axis` becomes the row of the
        true mask element of rank r (the number of true elements before it).
        """
        name = self.gather_rows_of_ranks(selection, value.name, value.shape, axis)
        return SelectedRows(selection, row_type_of(value, axis), axis, selection.axes, name)

    def spread(self, rows: SelectedRows, over: tuple[int, ...]) -> SelectedRows:
        """Return the rows stored with a row per combination of coordinates along the mask axes
        `over`, in addition to the axes along which they are stored now. Rows that are equal along
        an axis are repeated.
        """
        over = tuple(sorted({*rows.over, *over}))
        if over == rows.over:
            return rows
        before = rows.row_type.shape[: rows.axis]
        after = rows.row_type.shape[rows.axis + 1 :]
        selection = rows.selection
        present = tuple(selection.shape[axis] if axis in rows.over else 1 for axis in over)
        target = tuple(selection.shape[axis] for axis in over)
        expanded = self.expand(
            self.reshape(rows.value, (*before, *present, *after)),
            (*before, *present, *after),
            (*before, *target, *after),
        )
        value = self.reshape(expanded, (*before, math.prod(target), *after))
        return replace(rows, over=over, value=value)

    def apply_weights(self, rows: SelectedRows) -> SelectedRows:
        """Return the rows multiplied by their weights, the numbers with which they are still to be
        multiplied; `rows` if they have none.
        """
        if not rows.weight:
            return rows
        full = self.spread(replace(rows, weight="", weight_over=()), rows.weight_over)
        weight_type = Value("", rows.row_type.dtype, (1,))
        weight = self.spread(
            SelectedRows(rows.selection, weight_type, 0, rows.weight_over, rows.weight), full.over
        )
        ones = [1] * (len(full.shape) - full.axis - 1)
        aligned = self.reshape(weight.value, (*weight.shape, *ones))
        return replace(full, value=self.node("Mul", [full.value, aligned]))

    def fill_unselected(
        self, rows: SelectedRows, number: float, over: tuple[int, ...] | None = None
    ) -> SelectedRows:
        """Return the rows with `number` where the mask that selects them is false. Their weights
        are multiplied in.

        They are stored with a row per combination of coordinates along the mask axes `over` and
        their present axes, or along their present axes only if `over` is None.
        """
        rows = self.spread(self.apply_weights(rows), rows.over if over is None else over)
        mask, shape = self.any_selected(rows.selection, rows.over)
        wide = rows.selection.shape_along(rows.over)
        ones = [1] * (len(rows.shape) - rows.axis - 1)
        flat = self.reshape(self.expand(mask, shape, wide), (math.prod(wide), *ones))
        fill = self.scalar(number, rows.row_type.dtype)
        return replace(rows, value=self.node("Where", [flat, rows.value, fill]))

    def fill_unselected_pairs(self, rows: SelectedRows, number: float) -> SelectedRows:
        """Return rows that have a second dimension of rows, `pair_axis`, with `number` at the
        positions along it for which the mask is false.
        """
        assert rows.pair_axis is not None
        ones = [1] * (len(rows.shape) - rows.pair_axis - 1)
        flat = self.flat_mask(rows.selection)
        mask = self.reshape(flat, (rows.shape[rows.pair_axis], *ones))
        fill = self.scalar(number, rows.row_type.dtype)
        return replace(rows, value=self.node("Where", [mask, rows.value, fill]))

    def gather_rows_of_ranks(
        self, selection: Selection, source: str, shape: tuple[int, ...], axis: int
    ) -> str:
        """Write, for each element of the selection's mask, row r of the value `source` along
        `axis`, where r is the rank of the element (the number of true elements before it), at most
        the last row. Return the result's name. `shape` is that of `source`.

        If the mask is broadcast along its last axes, the elements along these axes are selected
        together. Then blocks of rows are gathered instead of single rows.
        """
        inner = 1
        stored = list(selection.mask_shape)
        wide = list(selection.shape)
        while stored and stored[-1] == 1 and shape[axis] % (inner * wide[-1]) == 0:
            inner *= wide.pop()
            stored.pop()
        blocks = math.prod(wide)
        mask = self.expand(self.reshape(selection.mask, stored), stored, wide)
        flags = self.reshape(self.cast(mask, DType.INT64), (blocks,))
        order = self.node("CumSum", [flags, self.scalar(0, DType.INT64)])
        one = self.scalar(1, DType.INT64)
        rank = self.node("Max", [self.node("Sub", [order, one]), self.scalar(0, DType.INT64)])
        last = self.scalar(shape[axis] // inner - 1, DType.INT64)
        clamped = self.node("Min", [rank, last])
        divided = self.reshape(
            source, (*shape[:axis], shape[axis] // inner, inner, *shape[axis + 1 :])
        )
        found = self.node("Gather", [divided, clamped], axis=axis)
        return self.reshape(found, replace_size(shape, axis, blocks * inner))
