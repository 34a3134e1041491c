"""Rows that data chooses, computed for every place that a mask could choose: static shapes, and a
mask beside them.

A selection is the true elements of a mask. A value with a row for each of them is held with a row
for each element of the mask, chosen or not; whoever puts rows together again (a scatter, a sum)
leaves out those that were not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.elements import NUMBERS, made_node, renamed

if TYPE_CHECKING:
    import onnx

ROWS = 1_000_003
"""Stands for the number of chosen rows in shapes, while they are told and axes are followed: a
prime that no file's own extents divide.
"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """How many first elements of a vector are chosen: `scale` times a whole number of 64 bits and
    `offset`.
    """

    count: str
    root: str
    """The root of a selection of as many as `count`."""
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The true elements of a mask, in row-major order."""

    mask: str
    held: tuple[int, ...]
    """The mask's shape as it is held: 1 along axes on which its elements do not depend."""
    shape: tuple[int, ...]
    node: str = field(compare=False)
    """Who chooses, for messages: the same elements may be chosen by several."""
    root: str = field(default="", compare=False)
    """The name of the mask's elements, whichever dimensions they are given."""
    prefix: Prefix | None = field(default=None, compare=False)
    """Where it chooses all rows before one along the mask's first axis, how many."""

    @property
    def first(self) -> Prefix | None:
        """How many elements are chosen, where those are the first."""
        return self.prefix if len(self.shape) == 1 else None

    @property
    def key(self) -> tuple[str, tuple[tuple[bool, int], ...]]:
        """The elements chosen, in their order: equal for masks that differ but in how dimensions
        are written.
        """
        parts: list[tuple[bool, int]] = []
        for held, extent in zip(self.held, self.shape, strict=True):
            if extent > 1 and parts and parts[-1][0] == (held == extent):
                parts[-1] = (parts[-1][0], parts[-1][1] * extent)
            elif extent > 1:
                parts.append((held == extent, extent))
        return self.root or self.mask, tuple(parts)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    def extent(self, over: Sequence[int]) -> int:
        return math.prod(self.shape[axis] for axis in over)

    def spread(self, over: Sequence[int]) -> tuple[int, ...]:
        """The mask's shape with the extents of axes `over`, 1 for all others."""
        return tuple(extent if axis in over else 1 for axis, extent in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Rows:
    """A value with a row for each chosen element: `value` holds it along dimension `axis` for all
    places along the mask's axes `over`, row-major; along the mask's other axes its rows are equal.
    Each row counts times its number in `weight`, [places along `weighed`], where there is one.
    """

    selection: Selection
    type: Value
    """As the file has it, with `ROWS` for the number of rows."""
    axis: int
    over: tuple[int, ...]
    value: str
    weight: str = ""
    weighed: tuple[int, ...] = ()
    beside: int | None = None
    """A second dimension with an element for each chosen row, which `type` and `value` have for
    every place: of scores of all rows with all rows.
    """

    @property
    def told(self) -> Value:
        """The type as the file has it."""
        shape = tuple(
            ROWS if axis == self.beside else extent for axis, extent in enumerate(self.type.shape)
        )
        return replace(self.type, shape=shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `value`."""
        count = self.selection.extent(self.over)
        return (*self.type.shape[: self.axis], count, *self.type.shape[self.axis + 1 :])


class Writer:
    """The nodes that stand for one node of the file."""

    def __init__(self, origin: onnx.NodeProto, opset: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._origin = origin
        self._opset = opset
        self._count = 0

    def node(
        self, operator: str, operands: Sequence[str], result: str = "", **attributes: Any
    ) -> str:
        """Write a node; the name of its result."""
        self._count += 1
        name = result or f"{next(filter(None, self._origin.output))}/rows/{self._count}"
        self.nodes.append(made_node(self._origin, operator, operands, [name], **attributes))
        return name

    def again(self, operands: Sequence[str], results: Sequence[str]) -> None:
        """Write the file's own node with other operands and results."""
        self.nodes.append(renamed(self._origin, operands, results))

    def state(self, name: str, number: int) -> None:
        """An attribute of the last node."""
        import onnx.helper

        self.nodes[-1].attribute.append(onnx.helper.make_attribute(name, number))

    def numbers(self, values: Sequence[int]) -> str:
        import onnx.helper

        held = onnx.helper.make_tensor(
            "value", onnx.TensorProto.INT64, [len(values)], [int(each) for each in values]
        )
        return self.node("Constant", [], value=held)

    def number(self, value: float, dtype: DType, result: str = "") -> str:
        """A scalar."""
        whole = abs(value) < 1 << 62 and value == int(value)
        held = self.node(
            "Constant", [], **({"value_int": int(value)} if whole else {"value_float": value})
        )
        return self.cast(held, dtype, result)

    def cast(self, name: str, dtype: DType, result: str = "") -> str:
        return self.node("Cast", [name], result, to=NUMBERS[dtype])

    def reshape(self, name: str, shape: Sequence[int], result: str = "") -> str:
        return self.node("Reshape", [name, self.numbers(shape)], result)

    def expand(self, name: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
        """From `shape` to the shape `wanted`."""
        return (
            name
            if tuple(shape) == tuple(wanted)
            else self.node("Expand", [name, self.numbers(wanted)])
        )

    def transpose(self, name: str, order: Sequence[int]) -> str:
        return (
            name
            if list(order) == sorted(order)
            else self.node("Transpose", [name], perm=list(order))
        )

    def summed(self, name: str, axes: Sequence[int]) -> str:
        """The sum along `axes`, which stay, with extent 1."""
        if self._opset < 13:
            return self.node("ReduceSum", [name], axes=list(axes), keepdims=1)
        return self.node("ReduceSum", [name, self.numbers(axes)], keepdims=1)

    def sliced(self, name: str, axis: int, start: int, end: int, result: str = "") -> str:
        if self._opset < 10:
            return self.node("Slice", [name], result, axes=[axis], starts=[start], ends=[end])
        return self.node(
            "Slice", [name, *(self.numbers([each]) for each in (start, end, axis))], result
        )

    def sorted(self, name: str, count: int) -> tuple[str, str]:
        """A vector's numbers from the smallest on, and their places."""
        self._count += 1
        values = f"{next(filter(None, self._origin.output))}/rows/{self._count}"
        operands = [name, self.numbers([count])]
        results = [values, f"{values}/places"]
        self.nodes.append(made_node(self._origin, "TopK", operands, results, axis=0, largest=0))
        return values, results[1]

    def in_order(self, mask: str, count: int) -> str:
        """The places of a mask, a vector of `count`: those where it is true, in their order, then
        the others.
        """
        last = self.cast(self.node("Not", [mask]), DType.INT64)
        steps = self.node("Range", [self.number(each, DType.INT64) for each in (0, count, 1)])
        ranks = self.node("Add", [self.node("Mul", [last, self.number(count, DType.INT64)]), steps])
        return self.sorted(ranks, count)[1]

    def chosen(self, selection: Selection, over: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Where any element of the mask is true along its axes but `over`, and the shape that this
        is held with: 1 along those, and where the mask's own is.
        """
        others = [axis for axis in selection.axes if axis not in over and selection.held[axis] > 1]
        if not others:
            return selection.mask, selection.held
        count = self.summed(self.cast(selection.mask, DType.INT32), others)
        shape = tuple(1 if axis in others else extent for axis, extent in enumerate(selection.held))
        return self.cast(count, DType.BOOL), shape

    def expressed(self, rows: Rows, selection: Selection) -> Rows:
        """The same rows, by a mask that chooses the same elements with its dimensions written
        otherwise.
        """
        if (rows.selection.held, rows.selection.shape) == (selection.held, selection.shape):
            return replace(rows, selection=selection)
        rows = self.whole(rows)
        return replace(
            self.placed(rows, rows.selection.axes), selection=selection, over=selection.axes
        )

    def line(self, selection: Selection) -> str:
        """The mask as a vector of all its places."""
        wide = self.expand(selection.mask, selection.held, selection.shape)
        return self.reshape(wide, (math.prod(selection.shape),))

    def ranks(self, selection: Selection) -> str:
        """Of each place how many are chosen before it, a vector."""
        flags = self.cast(self.line(selection), DType.INT64)
        return self.node("CumSum", [flags, self.number(0, DType.INT64)], exclusive=1)

    def packed(self, rows: Rows) -> Value:
        """The rows as a static value: those chosen, in their order, before all others."""
        rows = self.placed(self.whole(rows), rows.selection.axes)
        if rows.selection.first is not None:
            return Value(rows.value, rows.type.dtype, rows.shape)
        mask, blocks, inner = self.blocks(rows.selection)
        before = rows.shape[: rows.axis]
        after = rows.shape[rows.axis + 1 :]
        apart = self.reshape(rows.value, (*before, blocks, inner, *after))
        found = self.node("Gather", [apart, self.in_order(mask, blocks)], axis=rows.axis)
        return Value(self.reshape(found, rows.shape), rows.type.dtype, rows.shape)

    def blocks(self, selection: Selection) -> tuple[str, int, int]:
        """The mask as a vector for each run of neighbours that are chosen together, how many runs,
        and of how many.
        """
        held = list(selection.held)
        wide = list(selection.shape)
        inner = 1
        while len(held) > 1 and held[-1] == 1:
            inner *= wide.pop()
            held.pop()
        line = self.expand(self.reshape(selection.mask, held), held, wide)
        return self.reshape(line, (math.prod(wide),)), math.prod(wide), inner

    def unpacked(self, selection: Selection, value: Value, axis: int) -> Rows:
        """Rows of a static value, the first for the first that is chosen."""
        name = self.ranked(selection, value.name, value.shape, axis)
        shape = (*value.shape[:axis], ROWS, *value.shape[axis + 1 :])
        return Rows(selection, Value("", value.dtype, shape), axis, selection.axes, name)

    def placed(self, rows: Rows, over: tuple[int, ...]) -> Rows:
        """The same rows, held for all places along axes `over` and their own."""
        over = tuple(sorted({*rows.over, *over}))
        if over == rows.over:
            return rows
        before = rows.type.shape[: rows.axis]
        after = rows.type.shape[rows.axis + 1 :]
        selection = rows.selection
        narrow = tuple(selection.shape[axis] if axis in rows.over else 1 for axis in over)
        wide = tuple(selection.shape[axis] for axis in over)
        spread = self.expand(
            self.reshape(rows.value, (*before, *narrow, *after)),
            (*before, *narrow, *after),
            (*before, *wide, *after),
        )
        return replace(
            rows, over=over, value=self.reshape(spread, (*before, math.prod(wide), *after))
        )

    def whole(self, rows: Rows) -> Rows:
        """The same rows with their weights multiplied in."""
        if not rows.weight:
            return rows
        wide = self.placed(replace(rows, weight="", weighed=()), rows.weighed)
        type_ = Value("", rows.type.dtype, (ROWS,))
        weight = self.placed(Rows(rows.selection, type_, 0, rows.weighed, rows.weight), wide.over)
        ones = [1] * (len(wide.shape) - wide.axis - 1)
        aligned = self.reshape(weight.value, (*weight.shape, *ones))
        return replace(wide, value=self.node("Mul", [wide.value, aligned]))

    def filled(self, rows: Rows, number: float, over: tuple[int, ...] | None = None) -> Rows:
        """The same rows, with `number` in those of places (along `over`, their own if None) that
        are not chosen.
        """
        rows = self.placed(self.whole(rows), rows.over if over is None else over)
        mask, shape = self.chosen(rows.selection, rows.over)
        wide = rows.selection.spread(rows.over)
        flat = self.reshape(
            self.expand(mask, shape, wide),
            (math.prod(wide), *[1] * (len(rows.shape) - rows.axis - 1)),
        )
        kept = self.node("Where", [flat, rows.value, self.number(number, rows.type.dtype)])
        return replace(rows, value=kept)

    def filled_beside(self, rows: Rows, number: float) -> Rows:
        """The same rows, with `number` in the elements of those that are not chosen along their
        second dimension.
        """
        assert rows.beside is not None
        ones = [1] * (len(rows.shape) - rows.beside - 1)
        line = self.reshape(self.line(rows.selection), (rows.shape[rows.beside], *ones))
        kept = self.node("Where", [line, rows.value, self.number(number, rows.type.dtype)])
        return replace(rows, value=kept)

    def counted(self, selection: Selection) -> str:
        """How many elements are chosen, a whole number of 64 bits."""
        each = self.cast(selection.mask, DType.INT64)
        total = self.reshape(self.summed(each, selection.axes), ())
        repeats = math.prod(selection.shape) // math.prod(selection.held)
        return (
            total if repeats == 1 else self.node("Mul", [total, self.number(repeats, DType.INT64)])
        )

    def ranked(self, selection: Selection, source: str, shape: tuple[int, ...], axis: int) -> str:
        """A value with the same rows as the first of `source` along `axis`, in the order in which
        they are chosen: each place of the mask reads the row of its rank among the chosen.
        """
        inner = (
            1  # Along the last axes the mask may be broadcast: those elements are chosen together.
        )
        held = list(selection.held)
        wide = list(selection.shape)
        while held and held[-1] == 1 and shape[axis] % (inner * wide[-1]) == 0:
            inner *= wide.pop()
            held.pop()
        places = math.prod(wide)
        mask = self.expand(self.reshape(selection.mask, held), held, wide)
        flags = self.reshape(self.cast(mask, DType.INT64), (places,))
        order = self.node("CumSum", [flags, self.number(0, DType.INT64)])
        one = self.number(1, DType.INT64)
        first = self.node("Max", [self.node("Sub", [order, one]), self.number(0, DType.INT64)])
        last = self.number(shape[axis] // inner - 1, DType.INT64)
        rank = self.node("Min", [first, last])
        before = shape[:axis]
        after = shape[axis + 1 :]
        blocks = self.reshape(source, (*before, shape[axis] // inner, inner, *after))
        found = self.node("Gather", [blocks, rank], axis=axis)
        return self.reshape(found, (*before, places * inner, *after))
