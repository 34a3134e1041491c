"""A node that reads rows which data chooses, what is known of its operands, and whether it computes
each row alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Node, Value
from autopipe.ir.ops import OPERATORS, Signature
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.frontend.elements import attributes_of
from autopipe.passes.frontend.inference import Inference, content_of, form_of
from autopipe.passes.frontend.selections.places import Places
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection, Writer

if TYPE_CHECKING:
    import onnx


OTHER_ROWS = 1_000_033
"""A second number of rows, to tell how numbers depend on it."""
SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,), "Expand": (1,), "Range": (0, 1, 2), "Reshape": (1,), "Slice": (1, 2, 3, 4), "Split": (1,),
    "Tile": (1,), "TopK": (1,),
}  # fmt: skip
"""Operands that tell shapes, by operator."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Whole numbers that depend on the number of rows: for `ROWS` and for `OTHER_ROWS` of them."""

    selection: Selection
    numbers: tuple[np.ndarray, np.ndarray]


Held = Rows | Places | Counted


class Followed(NamedTuple):
    """Types of a node's results, and the dimension of each that counts rows; None for these where
    the node does not compute each row alone. Where values have two such dimensions, the second of
    each result, and where the node takes rows along it together, that of each operand.
    """

    types: list[Value]
    axes: list[int] | None = None
    beside: tuple[int | None, ...] = ()
    together: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """A node, its operands with aliases resolved, and what is known of them; `found` is what its
    results are.
    """

    node: onnx.NodeProto
    operands: tuple[str, ...]
    held: tuple[Held | None, ...]
    types: Mapping[str, Value]
    arrays: Mapping[str, np.ndarray]
    inference: Inference
    opset: int
    write: Writer
    known: dict[object, Followed]
    """Results of `followed` by what the node and its operands are: files repeat themselves."""
    joins: dict[object, Selection]
    """Of rows that were joined, the selections: by their parts, and by what of them depends on
    data, how often that is there, and how many others are.
    """
    found: dict[str, Held] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.node.op_type} {self.node.name!r}"

    def attribute(self, name: str, default: int = 0) -> int:
        return next((int(each.i) for each in self.node.attribute if each.name == name), default)

    def has(self, name: str) -> bool:
        return any(each.name == name for each in self.node.attribute)

    def refused(self) -> ModelError:
        """For a node that does something else with rows than compute each, or sum them up."""
        chooser = next((each.selection.node for each in self.held if each is not None), "data")
        return ModelError(
            (
                f"it takes together rows that {chooser} chooses by data, so that its result's "
                "shape "
                "cannot be told"
            ),
            hint=(
                "rows that data chooses may be computed one by one, then summed or put into a "
                "tensor"
            ),
            where=self.where,
        )

    def numbers(self, version: int = 0) -> list[np.ndarray | None]:
        """Numbers known of each operand where there are `ROWS` or, for `version` 1, `OTHER_ROWS`
        rows.
        """
        return [
            each.numbers[version]
            if isinstance(each, Counted)
            else self.arrays.get(name)
            if name
            else None
            for name, each in zip(self.operands, self.held, strict=True)
        ]

    def evaluated(
        self, arrays: Sequence[np.ndarray | None], types: Sequence[Value]
    ) -> tuple[np.ndarray, ...] | None:
        """The numbers of results of these types where operands have these numbers, for one row."""
        real = [
            Value("", each.dtype, tuple(1 if extent == ROWS else extent for extent in each.shape))
            for each in types
        ]
        return self.inference.evaluate(self.node, tuple(arrays), real)

    def followed(self) -> Followed:
        """Which dimensions of the results count rows."""
        types = [*map(self._type, self.operands, self.held)]
        numbers = self.numbers()
        kinds = tuple(None if each is None else (each.dtype, each.shape) for each in types)
        axes = tuple(self._dimensions(each) for each in self.held)
        contents = tuple(None if each is None else content_of(each) for each in numbers)
        key = (*form_of(self.node), kinds, axes, contents)
        if key not in self.known:
            self.known[key] = self._follow(types, numbers)
        return self.known[key]

    def _dimensions(self, held: Held | None) -> tuple[int, ...]:
        """The dimensions that count rows."""
        if not isinstance(held, Rows | Places):
            return ()
        return (
            (held.axis,)
            if isinstance(held, Places) or held.beside is None
            else (held.axis, held.beside)
        )

    def _follow(
        self, types: Sequence[Value | None], known: Sequence[np.ndarray | None]
    ) -> Followed:
        told = self.inference.types(self.node, tuple(zip(types, known, strict=True)))
        results = [each for each in told if each is not None]
        if len(results) < sum(map(bool, self.node.output)):
            raise self.refused()
        space = self._space(types, told, known)
        read = [
            (dims, self._dimensions(each))
            for dims, each in zip(space.operands, self.held, strict=True)
            if dims is not None
        ]
        names = [*dict.fromkeys(dims[axis] for dims, axes in read for axis in axes)]
        alone = [
            each
            for each in names
            if len(each) == 1 and space.axis(each[0]).kind is AxisKind.PARALLEL
        ]
        if len(names) not in (1, 2) or not alone:
            return Followed(results)
        other = next((each for each in names if each != alone[0]), None)
        written = [
            (_place(dims, alone[0]), _place(dims, other))
            for dims in space.results
            if dims is not None
        ]
        axes = [axis for axis, _ in written if axis is not None]
        if len(axes) < len(written):
            return Followed(results)
        if other is None:
            return Followed(results, axes)
        beside = tuple(each for _, each in written)
        if other in alone:
            return Followed(results, axes, beside)
        return Followed(
            results, axes, beside, tuple(_place(dims or (), other) for dims in space.operands)
        )

    def _type(self, name: str, held: Held | None) -> Value | None:
        if isinstance(held, Counted):
            return Value(name, DType.INT64, held.numbers[0].shape)
        if isinstance(held, Rows):
            return held.told
        return held.type if held is not None else self.types[name] if name else None

    def _space(
        self,
        types: Sequence[Value | None],
        results: Sequence[Value | None],
        known: Sequence[np.ndarray | None],
    ) -> Space:
        node = self.node
        domain = "" if node.domain == "ai.onnx" else node.domain
        row = OPERATORS.get(f"{domain}.{node.op_type}" if domain else node.op_type)
        if row is None:
            raise self.refused()
        known_node = Node(
            node.name, node.op_type, self.operands, tuple(node.output), attributes_of(node), domain
        )
        return row.space(
            Signature(known_node, tuple(types), tuple(results), tuple(known), self.opset)
        )


def _place(dims: Sequence[object], name: object) -> int | None:
    return next((place for place, each in enumerate(dims) if each == name), None)


def is_static(types: Sequence[Value]) -> bool:
    """True if no shape depends on the number of rows."""
    return all(extent == 0 or extent % ROWS for value in types for extent in value.shape)


def selection_of(
    use: Use, mask: str, held: Sequence[int], shape: tuple[int, ...], root: str = ""
) -> Selection:
    """The true elements of a mask, chosen by the node."""
    if not shape or math.prod(shape) == 0:
        raise ModelError(
            f"it chooses among no elements: the shape is {list(shape)}", where=use.where
        )
    return Selection(mask, tuple(held), shape, use.where, root)
