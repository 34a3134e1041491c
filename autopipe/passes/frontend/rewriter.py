"""The rewriter. It replaces one node by new nodes, and records the types of the values that these
write.

The decompositions of ONNX Runtime's operators, dynamic shapes, the fusion rules, and the cleanup
passes use it. `Rewriter` writes nodes; a `Scope` supplies the types of existing values and stores
new values. There are two kinds of scopes.

**While a file is read** (`interpret.py`) the caller receives a `FileRewriter`. The reader processes
each new node immediately, as if the file contained it: ONNX infers the types of the results,
results with known data become constants, and operators that have a decomposition are decomposed
again. The caller may omit shapes, and `shape(name)` works for a new value as soon as it is
written::

    def bias_add(rewriter: FileRewriter) -> None:
        x, bias, skip = (rewriter.required(index) for index in range(3))
        total = rewriter.add("Add", [x, bias])
        rewriter.add("Add", [total, skip], result=0)

`rewriter.opset`, which is the file's opset, defines the meaning of the nodes. A decomposition that
needs newer operators runs in a scope of opset `NEWEST`. There it must state all shapes, and no
constants are folded.

**On a graph** the scope is a `GraphEdit`. The caller states all shapes, collects `rewriter.nodes`,
and builds the new graph with `GraphEdit.build`::

    edit = GraphEdit(graph)
    rewriter = Rewriter(edit, node)
    heads = rewriter.reshape(node.inputs[0], 8, 12, 64)
    rewriter.add("Transpose", [heads], (12, 8, 64), result=0, perm=(1, 0, 2))
    edit.build([*before, *rewriter.nodes, *after])

`result=0` makes a node write result 0 of the replaced node. `set_result(0, name)` declares instead
that the value `name` is that result (only while a file is read). An absent operand is "".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, Constant, DType, Graph, Node, Value
from autopipe.passes.frontend.elements import NUMBERS, checked_shape, copy_with_names, scalar_array

if TYPE_CHECKING:
    import onnx

NEWEST = 25
"""The opset of nodes that are written with the types of their results. It is independent of the
file's opset.
"""
MAX_RANGE = 1 << 24
"""Maximum number of integers in one constant that `Rewriter.range` writes. The limit is needed
because a file can declare any size.
"""
SLICE_OPERANDS_SINCE = 10
"""The first opset in which Slice reads its bounds as operands. Before, they are attributes."""
CLIP_OPERANDS_SINCE = 11
"""The first opset in which Clip reads its bounds as operands. Before, they are attributes."""
SPLIT_OPERANDS_SINCE = 13
"""The first opset in which Split reads its sizes as operand. Before, they are an attribute."""
REDUCE_SUM_OPERANDS_SINCE = 13
"""The first opset in which ReduceSum reads its axes as operand. Before, they are an attribute."""


class Scope(Protocol):
    """The values that a rewriter can read, and the destination of the nodes and values that it
    writes.
    """

    @property
    def opset(self) -> int:
        """The opset that defines the meaning of new nodes."""

    def type_of(self, name: str) -> Value:
        """Return the type of the value `name`."""

    def array(self, name: str) -> np.ndarray | None:
        """Return the data of the value `name`; None if they are unknown."""

    def unique_name(self, name: str) -> str:
        """Return `name`, or a similar name if `name` is in use."""

    def add_constant(self, value: Value, array: np.ndarray) -> None:
        """Add a constant with the type `value` and the data `array`."""

    def add(self, node: Node, results: tuple[Value, ...]) -> None:
        """Add a new node. `results` are the types of the values that it writes; () if the caller
        gave no shapes.
        """


class Rewriter:
    """Writes new nodes in place of `node`, in topological order. Its methods take and return names
    of values.
    """

    def __init__(self, scope: Scope, node: Node) -> None:
        self.scope = scope
        self.node = node
        self.nodes: list[Node] = []
        """The nodes written so far."""
        self.aliases: dict[str, str] = {}
        """For results of `node` that no new node writes: the name of the value that replaces the
        result (see `set_result`).
        """
        self._constants = 0
        self._written = 0

    @property
    def opset(self) -> int:
        """The opset that defines the meaning of new nodes."""
        return self.scope.opset

    @property
    def where(self) -> str:
        """Operator and name of the replaced node, for error messages."""
        return f"{self.node.op} {self.node.name!r}"

    def operand(self, index: int) -> str:
        """Return the name of operand `index` of the replaced node; "" if it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def required(self, index: int) -> str:
        """Return the name of operand `index` of the replaced node. Raises ModelError if it is
        absent.
        """
        self.require(bool(self.operand(index)), f"{self.node.op} lacks operand {index}")
        return self.node.inputs[index]

    def has_result(self, index: int) -> bool:
        """True if the replaced node writes result `index`."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def require(self, fits: bool, message: str) -> None:
        """Raise ModelError with `message` for the replaced node unless `fits` is true."""
        if not fits:
            raise ModelError(message, where=self.where)

    def type_of(self, name: str) -> Value:
        return self.scope.type_of(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.scope.type_of(name).shape

    def known_integer(self, index: int) -> int | None:
        """Return the integer that operand `index` of the replaced node holds. Returns None if the
        operand's data are unknown or have several elements.
        """
        array = self.scope.array(self.operand(index)) if self.operand(index) else None
        return int(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def set_result(self, index: int, name: str) -> None:
        """Declare that the value `name` is result `index` of the replaced node. Ignored if the node
        has no such result.
        """
        if self.has_result(index):
            self.aliases[self.node.outputs[index]] = name

    def attributes(self, *omitted: str) -> dict[str, Any]:
        """Return the attributes of the replaced node by name, without the names in `omitted`."""
        return {key: value for key, value in self.node.attributes if key not in omitted}

    def add(
        self,
        op: str,
        operands: Sequence[str],
        *shapes: Sequence[int],
        dtype: DType | None = None,
        result: int | None = None,
        results: Sequence[str] = (),
        name: str = "",
        domain: str = "",
        **attributes: Attribute | None,
    ) -> str:
        """Write a node and return the name of its first result.

        - `shapes`: the shape of each result. None are needed if the scope infers types.
        - `dtype`: the element type of all results; by default, that of the first operand.
        - `result`: index of the replaced node's result that the new node writes.
        - `results`: names of the new node's results if `result` is None. By default, new names are
          made; the second and later names end in /1, /2, …
        - `name`: name of the node.
        - `attributes`: attributes that are None are omitted. Absent operands at the end are
          omitted, too.
        """
        names = tuple(results) if result is None else (self.node.outputs[result],)
        if not names:
            owner = self.node.outputs[0] or self.node.name
            first = self.scope.unique_name(f"{owner}/{op.lower()}_{self._written}")
            names = (first, *(f"{first}/{number}" for number in range(1, len(shapes))))
        if not name:
            replaces_all = result is not None and not self._written
            name = (
                self.node.name if replaces_all else f"{self.node.name or self.node.op}/{op.lower()}"
            )
        values: tuple[Value, ...] = ()
        if shapes:
            dtype = dtype or self.type_of(operands[0]).dtype
            values = tuple(
                Value(each, dtype, checked_shape(tuple(shape), self.where))
                for each, shape in zip(names, shapes, strict=True)
            )
        present = list(operands)
        while present and not present[-1]:
            present.pop()
        stated = sorted((key, value) for key, value in attributes.items() if value is not None)
        node = Node(name, op, tuple(present), names, tuple(stated), domain)
        self.nodes.append(node)
        self._written += 1
        self.scope.add(node, values)
        return names[0]

    def constant(self, array: np.ndarray, dtype: DType | None = None) -> str:
        """Add a constant with the data `array` and return its name. `dtype` is needed for types
        that numpy lacks.
        """
        owner = self.node.outputs[0] or self.node.name
        name = self.scope.unique_name(f"{owner}/constant_{self._constants}")
        self._constants += 1
        self.scope.add_constant(Value(name, dtype or DType(array.dtype.name), array.shape), array)
        return name

    def integers(self, *values: int) -> str:
        """Add a constant vector of int64 and return its name."""
        return self.constant(np.asarray(values, np.int64))

    def integer(self, value: int) -> str:
        """Add a constant int64 scalar and return its name."""
        return self.constant(np.asarray(value, np.int64))

    def floats(self, *values: float) -> str:
        """Add a constant vector of float32 and return its name."""
        return self.constant(np.asarray(values, np.float32))

    def range(self, first: int, stop: int, *shape: int) -> str:
        """Add an int64 constant with the integers first … stop − 1 and return its name. It is a
        vector, or has the shape `shape`, one size of which may be −1. Raises ModelError for more
        than `MAX_RANGE` integers.
        """
        self.require(
            stop - first <= MAX_RANGE,
            f"a range of length {stop - first} is not supported, the maximum is {MAX_RANGE}",
        )
        return self.constant(np.arange(first, stop).reshape(shape or -1))

    def number(self, value: float, dtype: DType) -> str:
        """Add a constant scalar of the floating-point type `dtype` and return its name. A value
        outside of the type's range is clamped.
        """
        return self.constant(scalar_array(value, dtype), dtype)

    def reshape(self, name: str, *shape: int, result: int | None = None) -> str:
        """Write a Reshape of the value `name` to `shape` and return the name of its result, which
        is result number `result` of the replaced node or, if `result` is None, a new value. Returns
        `name` without writing a node if the value is of that shape and `result` is None.
        """
        if shape == self.shape(name) and result is None:
            return name
        return self.add("Reshape", [name, self.integers(*shape)], shape, result=result)

    def cast(self, name: str, dtype: DType) -> str:
        """Write a Cast of the value `name` to `dtype` and return the name of its result. Returns
        `name` if it has that type.
        """
        if self.type_of(name).dtype is dtype:
            return name
        return self.add("Cast", [name], self.shape(name), dtype=dtype, to=NUMBERS[dtype])

    def transpose(self, name: str, *order: int, result: int | None = None) -> str:
        """Write a Transpose and return the name of its result, whose axis i is axis `order[i]` of
        the value `name`. `result` is the index of the replaced node's result that it writes; None
        for a new value.
        """
        shape = self.shape(name)
        moved = [shape[axis] for axis in order]
        return self.add("Transpose", [name], moved, result=result, perm=order)

    def binary(
        self, op: str, left: str, right: str, dtype: DType | None = None, result: int | None = None
    ) -> str:
        """Write the elementwise operator `op` of two operands and return the name of its result.
        `result` is the index of the replaced node's result that it writes; None for a new value.
        Raises ModelError if the operands' shapes cannot be broadcast to each other.
        """
        try:
            shape = np.broadcast_shapes(self.shape(left), self.shape(right))
        except ValueError as error:
            message = (
                f"the operand shapes {self.shape(left)} and {self.shape(right)} of {op} "
                "cannot be broadcast to each other"
            )
            raise ModelError(message, where=self.where) from error
        return self.add(op, [left, right], shape, dtype=dtype, result=result)

    def select(self, condition: str, chosen: str, other: str) -> str:
        """Write a Where and return the name of its result: the elements of `chosen` at positions at
        which `condition` is true, otherwise those of `other`.
        """
        shape = np.broadcast_shapes(*map(self.shape, (condition, chosen, other)))
        return self.add(
            "Where", [condition, chosen, other], shape, dtype=self.type_of(chosen).dtype
        )

    def expand(self, name: str, *shape: int) -> str:
        """Write an Expand of the value `name` to `shape` and return the name of its result. Returns
        `name` if it has that shape.
        """
        if shape == self.shape(name):
            return name
        return self.add("Expand", [name, self.integers(*shape)], shape)

    def split(self, name: str, axis: int, *sizes: int) -> list[str]:
        """Write a Split of the value `name` into parts of `sizes` along `axis`, and return the
        names of the parts. Raises ModelError unless the sizes add up to that of the axis.
        """
        shape = self.shape(name)
        self.require(
            sum(sizes) == shape[axis],
            f"the parts {sizes} of axis {axis} do not add up to its size {shape[axis]}",
        )
        parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        if self.opset < SPLIT_OPERANDS_SINCE:
            self.add("Split", [name], *parts, axis=axis, split=sizes)
        else:
            self.add("Split", [name, self.integers(*sizes)], *parts, axis=axis)
        return list(self.nodes[-1].outputs)

    def concat(self, axis: int, *names: str) -> str:
        """Write a Concat of the values `names` along `axis` and return the name of its result."""
        shape = self.shape(names[0])
        size = sum(self.shape(name)[axis] for name in names)
        return self.add("Concat", names, (*shape[:axis], size, *shape[axis + 1 :]), axis=axis)

    def slice(
        self, name: str, bounds: Mapping[int, tuple[int, int]], result: int | None = None
    ) -> str:
        """Write a Slice of the value `name` and return the name of its result. `bounds` maps an
        axis to (start, stop), where the element at stop is excluded. Bounds must lie within the
        axis. `result` is the index of the replaced node's result that it writes; None for a new
        value.
        """
        shape = list(self.shape(name))
        for axis, (start, stop) in bounds.items():
            shape[axis] = stop - start
        starts, stops = zip(*bounds.values(), strict=True)
        axes = tuple(bounds)
        if self.opset < SLICE_OPERANDS_SINCE:
            return self.add(
                "Slice", [name], shape, result=result, starts=starts, ends=stops, axes=axes
            )
        operands = [name, *(self.integers(*each) for each in (starts, stops, axes))]
        return self.add("Slice", operands, shape, result=result)

    def clip(self, name: str, low: float, high: float, result: int | None = None) -> str:
        """Write a Clip of the float32 value `name` to low … high and return the name of its result.
        `result` is the index of the replaced node's result that it writes; None for a new value.
        """
        shape = self.shape(name)
        if self.opset < CLIP_OPERANDS_SINCE:
            return self.add("Clip", [name], shape, result=result, min=low, max=high)
        bounds = (self.number(each, DType.FLOAT32) for each in (low, high))
        return self.add("Clip", [name, *bounds], shape, result=result)

    def sum(self, name: str, *axes: int) -> str:
        """Write a sum of the value `name` along `axes` and return the name of its result, in which
        these axes have size 1. Axes must not be negative.
        """
        shape = [1 if axis in axes else size for axis, size in enumerate(self.shape(name))]
        if self.opset < REDUCE_SUM_OPERANDS_SINCE:
            return self.add("ReduceSum", [name], shape, axes=axes, keepdims=1)
        return self.add("ReduceSum", [name, self.integers(*axes)], shape, keepdims=1)

    def pad_end(self, name: str, axis: int, size: int) -> str:
        """Write a Pad that appends zeros to the value `name` until `axis` has the size `size`, and
        return the name of its result. Returns `name` if the axis has that size.
        """
        shape = self.shape(name)
        if shape[axis] == size:
            return name
        pads = [0] * (2 * len(shape))
        pads[len(shape) + axis] = size - shape[axis]
        padded = (*shape[:axis], size, *shape[axis + 1 :])
        return self.add("Pad", [name, self.integers(*pads)], padded)


class FileRewriter(Rewriter):
    """A rewriter for the node `proto` of a file. Its scope reads each new node as if the file
    contained it. `read` makes the reader process a node.
    """

    def __init__(
        self,
        scope: Scope,
        node: Node,
        proto: onnx.NodeProto,
        read: Callable[[onnx.NodeProto], None],
    ) -> None:
        super().__init__(scope, node)
        self.proto = proto
        self._read = read

    @property
    def is_unchanged(self) -> bool:
        """True if the caller has written no node and declared no result, so that the replaced node
        is kept.
        """
        return not (self._written or self.aliases)

    def copy(self, node: onnx.NodeProto) -> None:
        """Write a node that the caller has built as protobuf message, for example a node of a
        subgraph of the file.
        """
        self._written += 1
        self._read(node)

    def repeat(self, operands: Sequence[str], results: Sequence[str]) -> None:
        """Write the replaced node again, with other operands and results."""
        self.copy(copy_with_names(self.proto, operands, results))


class GraphEdit:
    """The scope of a rewriter on a graph: collects the values and constants that are added to the
    graph. Names that are in use get "_" appended until they are unique.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[str, Value] = {}
        """New values that nodes write, by name."""
        self.constants: dict[str, Constant] = {}
        """New constants, by name."""
        self._names: set[str] = set()

    @property
    def opset(self) -> int:
        return self.graph.opset

    def type_of(self, name: str) -> Value:
        return self.values.get(name) or (
            self.constants[name].value if name in self.constants else self.graph.type_of(name)
        )

    def array(self, name: str) -> np.ndarray | None:
        constant = self.constants.get(name) or self.graph.constant(name)
        return None if constant is None else constant.array

    def unique_name(self, name: str) -> str:
        """Return `name`, with "_" appended until neither a value of the graph nor another new name
        equals it.
        """
        while self.graph.has(name) or name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def value(self, name: str, dtype: DType, shape: Sequence[int]) -> str:
        """Add a value that a new node is to write, and return its name."""
        name = self.unique_name(name)
        self.values[name] = Value(name, dtype, tuple(shape))
        return name

    def constant(self, name: str, array: np.ndarray, dtype: DType | None = None) -> str:
        """Add a constant with the data `array` and return its name. `dtype` is needed for types
        that numpy lacks.
        """
        name = self.unique_name(name)
        self.add_constant(Value(name, dtype or DType(array.dtype.name), array.shape), array)
        return name

    def shape_operand(self, name: str, shape: Sequence[int]) -> str:
        """Add a constant with the integers `shape`, for the Reshape or Expand that writes the value
        `name`, and return the constant's name.
        """
        return self.constant(f"{name}_shape", np.asarray(shape, np.int64))

    def add_constant(self, value: Value, array: np.ndarray) -> None:
        self.constants[value.name] = Constant(value, array)

    def add(self, node: Node, results: tuple[Value, ...]) -> None:
        """Record the types `results` of the values that the new node writes."""
        assert results, f"{node.op} {node.name!r} is written without the shapes of its results"
        self._names.update(node.outputs)
        self.values.update((value.name, value) for value in results)

    def build(self, nodes: Iterable[Node]) -> Graph:
        """Return the graph with `nodes` in place of its nodes, and with the new values and
        constants.
        """
        nodes = tuple(nodes)
        return dataclasses.replace(
            self.graph,
            nodes=nodes,
            constants=(*self.graph.constants, *self.constants.values()),
            values=tuple(self.type_of(name) for node in nodes for name in node.outputs if name),
        )
