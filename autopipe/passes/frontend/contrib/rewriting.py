"""A node of a file in terms of operators that may be newer than the file's sets, under which ONNX
would not type them: what takes its place in the graph, each piece with its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, DType, Node, Value
from autopipe.passes.frontend.elements import NUMBERS, attributes_of, number_array, shape_of

if TYPE_CHECKING:
    import onnx


MOST_PLACES = 1 << 24
"""Tokens whose places are counted: a file may state any extent."""


@dataclass(slots=True)
class Rewriting:
    """The nodes, types and constants that take a node's place. Operators have the meaning of opset
    25 whatever the file's. A value is known by its name; "" is an absent one.
    """

    proto: onnx.NodeProto
    operands: tuple[str, ...]
    types: Mapping[str, Value]
    """Of the values that the graph has so far."""
    arrays: Mapping[str, np.ndarray]
    node: Node = field(init=False)
    """The node itself."""
    nodes: list[Node] = field(default_factory=list)
    made: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    """By the name of what the node writes the value that it is."""

    def __post_init__(self) -> None:
        proto = self.proto
        attributes = attributes_of(proto)
        self.node = Node(
            proto.name, proto.op_type, self.operands, tuple(proto.output), attributes, proto.domain
        )

    @property
    def where(self) -> str:
        return f"{self.node.op} {self.node.name!r}"

    def operand(self, index: int) -> str:
        """The name of an operand, "" where it is absent."""
        return self.operands[index] if index < len(self.operands) else ""

    def required(self, index: int) -> str:
        if not self.operand(index):
            raise ModelError(f"{self.node.op} lacks operand {index}", where=self.where)
        return self.operands[index]

    def wants(self, index: int) -> bool:
        """True if the node writes result `index`."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def gives(self, index: int, name: str) -> None:
        """Say which value result `index` is."""
        if self.wants(index):
            self.results[self.node.outputs[index]] = name

    def type_of(self, name: str) -> Value:
        return self.made.get(name) or self.types[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.type_of(name).shape

    def known(self, index: int) -> int | None:
        """The number that an operand of one element is, where that is known."""
        array = self.arrays.get(self.operand(index))
        return int(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def require(self, fits: bool, message: str) -> None:
        if not fits:
            raise ModelError(message, where=self.where)

    def add(
        self,
        operator: str,
        operands: Sequence[str],
        *shapes: Sequence[int],
        dtype: DType | None = None,
        **attributes: Attribute,
    ) -> str:
        """A node whose results have these shapes, and the type of the first operand where no other
        is told; the name of its first result. The others end in /1, /2 …
        """
        base = f"{self.node.outputs[0]}/{operator.lower()}_{len(self.nodes)}"
        names = [base, *(f"{base}/{number}" for number in range(1, len(shapes)))]
        dtype = dtype or self.type_of(operands[0]).dtype
        for name, shape in zip(names, shapes, strict=True):
            self.made[name] = Value(name, dtype, shape_of(tuple(shape), self.where))
        title = f"{self.node.name or self.node.op}/{operator.lower()}"
        pairs = tuple(sorted(attributes.items()))
        while not operands[-1]:
            operands = operands[:-1]
        self.nodes.append(Node(title, operator, tuple(operands), tuple(names), pairs))
        return base

    def itself(self, *shapes: Sequence[int], dtype: DType | None = None) -> None:
        """ONNX's own operator of the node's name, with its attributes and results of these shapes,
        and of the first operand's type where no other is told.
        """
        self.add(self.node.op, self.operands, *shapes, dtype=dtype, **dict(self.node.attributes))
        for index, name in enumerate(self.nodes[-1].outputs):
            self.gives(index, name)

    def constant(self, array: np.ndarray, dtype: DType | None = None) -> str:
        name = f"{self.node.outputs[0]}/constant_{len(self.constants)}"
        self.made[name] = Value(name, dtype or DType(array.dtype.name), array.shape)
        self.constants[name] = array
        return name

    def number(self, value: float, dtype: DType) -> str:
        """A scalar, the largest or smallest of its type where it lies beyond."""
        return self.constant(number_array(value, dtype), dtype)

    def integers(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    def places(self, first: int, last: int, *shape: int) -> str:
        """The whole numbers from `first` up to `last`, which it leaves out, in a shape that -1 may
        stand in.
        """
        self.require(
            last - first <= MOST_PLACES, f"more than {MOST_PLACES} tokens are not supported"
        )
        return self.constant(np.arange(first, last).reshape(shape))

    def reshape(self, name: str, *shape: int) -> str:
        if shape == self.shape(name):
            return name
        return self.add("Reshape", [name, self.integers(*shape)], shape)

    def cast(self, name: str, dtype: DType) -> str:
        if self.type_of(name).dtype is dtype:
            return name
        return self.add("Cast", [name], self.shape(name), dtype=dtype, to=NUMBERS[dtype])

    def transpose(self, name: str, *order: int) -> str:
        shape = self.shape(name)
        return self.add("Transpose", [name], [shape[axis] for axis in order], perm=order)

    def both(self, operator: str, left: str, right: str, dtype: DType | None = None) -> str:
        """An operator of two operands that are broadcast."""
        try:
            shape = np.broadcast_shapes(self.shape(left), self.shape(right))
        except ValueError as error:
            message = f"the shapes {self.shape(left)} and {self.shape(right)} do not fit"
            raise ModelError(message, where=self.where) from error
        return self.add(operator, [left, right], shape, dtype=dtype)

    def choose(self, condition: str, yes: str, no: str) -> str:
        shape = np.broadcast_shapes(*map(self.shape, (condition, yes, no)))
        return self.add("Where", [condition, yes, no], shape, dtype=self.type_of(yes).dtype)

    def split(self, name: str, axis: int, *sizes: int) -> list[str]:
        shape = self.shape(name)
        self.require(sum(sizes) == shape[axis], f"parts of {sizes} do not make up {shape[axis]}")
        parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        self.add("Split", [name, self.integers(*sizes)], *parts, axis=axis)
        return list(self.nodes[-1].outputs)

    def concat(self, axis: int, *names: str) -> str:
        shape = self.shape(names[0])
        extent = sum(self.shape(name)[axis] for name in names)
        return self.add("Concat", names, (*shape[:axis], extent, *shape[axis + 1 :]), axis=axis)

    def lengthened(self, name: str, axis: int, extent: int) -> str:
        """With zeros behind, up to an extent along an axis."""
        shape = self.shape(name)
        if shape[axis] == extent:
            return name
        pads = [0] * (2 * len(shape))
        pads[len(shape) + axis] = extent - shape[axis]
        return self.add(
            "Pad", [name, self.integers(*pads)], (*shape[:axis], extent, *shape[axis + 1 :])
        )


Rewriter = Callable[[Rewriting], None]
"""Function that puts together what takes a node's place and says what its results are."""
