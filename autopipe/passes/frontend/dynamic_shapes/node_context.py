"""A node that reads selected rows, the facts of its operands, and the axes of its results that
count rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Node, Value
from autopipe.ir.ops import OPERATORS, Signature
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.frontend.dynamic_shapes.domain import (
    WITNESS,
    Counted,
    Fact,
    Selection,
    row_axes_of,
    witness_type,
)
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter
from autopipe.passes.frontend.dynamic_shapes.sizes import Number
from autopipe.passes.frontend.elements import attributes_of
from autopipe.passes.frontend.inference import Inference, content_of, form_of

if TYPE_CHECKING:
    import onnx

SHAPE_OPERANDS = {name: row.sizes for name, row in OPERATORS.items() if row.sizes}
"""By operator, the operands that are sizes or positions."""


class RowAxes(NamedTuple):
    """The axes of a node's results that count rows, as the operator's iteration space defines
    them.
    """

    types: list[Value]
    """Types of the results for n = WITNESS."""
    axes: list[int] | None = None
    """The axis of each result that counts rows; None if a result combines several rows."""
    pair_axes: tuple[int | None, ...] = ()
    """The second such axis of each result; () if no operand has two."""
    reduced_axes: tuple[int | None, ...] = ()
    """The axis of each operand along which the node combines rows, where a second axis counts rows
    that stay apart; () if there is none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node and its operands, which are names with aliases resolved, with their facts and
    types.
    """

    node: onnx.NodeProto
    operands: tuple[str, ...]
    facts: tuple[Fact | None, ...]
    """The fact of each operand; None for a static one."""
    types: Mapping[str, Value]
    """Types of the static values of the graph."""
    arrays: Mapping[str, np.ndarray]
    """The static values whose elements are known before running."""
    inference: Inference
    opset: int
    row_axes_cache: dict[object, RowAxes]
    """Results of `row_axes` by node and operands, since nodes of a file repeat."""
    derived_selections: dict[object, Selection]
    """Selections that are made of others, by a name of their elements. Selections with as many rows
    as `scale * n + offset` of another are also found by (key of the other, scale, offset).
    """
    results: dict[str, Fact] = field(default_factory=dict)
    """The facts of the node's results, to which laws add."""

    @property
    def title(self) -> str:
        """Operator and name, for messages."""
        return f"{self.node.op_type} {self.node.name!r}"

    def fact(self, slot: int) -> Fact | None:
        """Return the fact of an operand; None if the operand is static or absent."""
        return self.facts[slot] if slot < len(self.facts) else None

    def integer(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        return next((int(each.i) for each in self.node.attribute if each.name == name), default)

    def has_attribute(self, name: str) -> bool:
        """True if the node states the attribute."""
        return any(each.name == name for each in self.node.attribute)

    def unsupported(self) -> ModelError:
        """Return the error for a node that combines selected rows in an unsupported way."""
        selections = (each.selection.node for each in self.facts if each is not None)
        return ModelError(
            f"the node combines rows that {next(selections, 'another node')} selects depending "
            "on data, so the shape of the result is unknown",
            hint="compute the selected rows independently, then sum the results or scatter them "
            "into a tensor",
            where=self.title,
        )

    def numbers(self) -> list[Number]:
        """Return the known elements of each operand: an array, polynomials in n, or None."""
        return [
            each.numbers if isinstance(each, Counted) else self.arrays.get(name) if name else None
            for name, each in zip(self.operands, self.facts, strict=True)
        ]

    def number(self, slot: int) -> Number:
        """Return the known elements of one operand: an array, polynomials in n, or None."""
        return self.numbers()[slot] if slot < len(self.operands) else None

    def numbers_for(self, count: int) -> list[np.ndarray | None]:
        """Return the known elements of each operand for n = `count`."""
        return [
            each if each is None or isinstance(each, np.ndarray) else each.at(count)
            for each in self.numbers()
        ]

    def evaluated(
        self, arrays: Sequence[np.ndarray | None], types: Sequence[Value]
    ) -> tuple[np.ndarray, ...] | None:
        """Return the results of the node on these arrays for one row, given the result types for
        n = WITNESS; None if the evaluator cannot compute them.
        """
        one_row = [
            Value(
                "", each.dtype, tuple(1 if extent == WITNESS else extent for extent in each.shape)
            )
            for each in types
        ]
        return self.inference.evaluate(self.node, tuple(arrays), one_row)

    def row_axes(self) -> RowAxes:
        """Return which axes of the results count rows."""
        types = [*map(self._type, self.operands, self.facts)]
        numbers = self.numbers_for(WITNESS)
        kinds = tuple(None if each is None else (each.dtype, each.shape) for each in types)
        axes = tuple(map(row_axes_of, self.facts))
        contents = tuple(None if each is None else content_of(each) for each in numbers)
        key = (*form_of(self.node), kinds, axes, contents)
        if key not in self.row_axes_cache:
            self.row_axes_cache[key] = self._follow_rows(types, numbers)
        return self.row_axes_cache[key]

    def _follow_rows(
        self, types: Sequence[Value | None], known: Sequence[np.ndarray | None]
    ) -> RowAxes:
        """Find the axis of the iteration space that counts rows, and its dimension in each result.

        The node computes each row by itself if this axis is parallel and every result has it as a
        dimension by itself. The same must hold for one of two axes if values have two.
        """
        inferred = self.inference.types(self.node, tuple(zip(types, known, strict=True)))
        results = [each for each in inferred if each is not None]
        if len(results) < sum(map(bool, self.node.output)):
            raise self.unsupported()
        space = self._space(types, inferred, known)
        names = [
            dimensions[axis]
            for dimensions, fact in zip(space.operands, self.facts, strict=True)
            if dimensions is not None
            for axis in row_axes_of(fact)
        ]
        names = [*dict.fromkeys(names)]
        parallel = [
            each
            for each in names
            if len(each) == 1 and space.axis(each[0]).kind is AxisKind.PARALLEL
        ]
        if len(names) not in (1, 2) or not parallel:
            return RowAxes(results)
        row = parallel[0]
        pair = next((each for each in names if each != row), None)
        written = [
            (_position(dimensions, row), _position(dimensions, pair))
            for dimensions in space.results
            if dimensions is not None
        ]
        axes = [axis for axis, _ in written if axis is not None]
        if len(axes) < len(written):
            return RowAxes(results)
        if pair is None:
            return RowAxes(results, axes)
        pair_axes = tuple(each for _, each in written)
        if pair in parallel:
            return RowAxes(results, axes, pair_axes)
        reduced_axes = tuple(_position(each or (), pair) for each in space.operands)
        return RowAxes(results, axes, pair_axes, reduced_axes)

    def _type(self, name: str, fact: Fact | None) -> Value | None:
        if fact is not None:
            return witness_type(fact)
        return self.types[name] if name else None

    def _space(
        self,
        types: Sequence[Value | None],
        results: Sequence[Value | None],
        known: Sequence[np.ndarray | None],
    ) -> Space:
        """Return the iteration space of the node for n = WITNESS."""
        node = self.node
        domain = "" if node.domain == "ai.onnx" else node.domain
        operator = OPERATORS.get(f"{domain}.{node.op_type}" if domain else node.op_type)
        if operator is None:
            raise self.unsupported()
        typed_node = Node(
            node.name, node.op_type, self.operands, tuple(node.output), attributes_of(node), domain
        )
        return operator.space(
            Signature(typed_node, tuple(types), tuple(results), tuple(known), self.opset)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext(NodeFacts):
    """A node that is replaced, and the writer of the nodes that replace it."""

    write: RowWriter


def _position(dimensions: Sequence[object], name: object) -> int | None:
    return next((place for place, each in enumerate(dimensions) if each == name), None)


def selection_of(
    context: NodeFacts,
    mask: str,
    mask_shape: Sequence[int],
    shape: tuple[int, ...],
    root: str = "",
) -> Selection:
    """Return the selection of a mask's true elements by the node. Raises ModelError if the mask has
    no elements.
    """
    if not shape or math.prod(shape) == 0:
        raise ModelError(
            f"the mask has the shape {list(shape)}, so it selects no element",
            where=context.title,
        )
    return Selection(mask, tuple(mask_shape), shape, context.title, root)
