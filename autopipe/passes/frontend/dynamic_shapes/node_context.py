"""A node that reads values whose shape depends on data, the facts of its operands, and the axes of
its results that count selected rows.
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
    CountedNumbers,
    Fact,
    Selection,
    row_axes_of,
    witness_type,
)
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter
from autopipe.passes.frontend.dynamic_shapes.sizes import Number
from autopipe.passes.frontend.elements import attributes_of
from autopipe.passes.frontend.inference import Inference, cached_content, node_key

if TYPE_CHECKING:
    import onnx

SHAPE_OPERANDS = {name: row.sizes for name, row in OPERATORS.items() if row.sizes}
"""By operator, the indices of the operands that are sizes or positions."""


class RowAxes(NamedTuple):
    """The dimensions of a node's results that count rows selected by data. They follow from the
    node's iteration space: the axes over which it loops, and the dimension of each operand and
    result that an axis is.
    """

    types: list[Value]
    """Types of the results if n, the number of selected rows, is `WITNESS`."""
    axes: list[int] | None = None
    """The dimension of each result that counts rows; None if a result combines several rows."""
    pair_axes: tuple[int | None, ...] = ()
    """For each result, the second dimension that counts rows, None if it has none. () if no operand
    has two such dimensions.
    """
    reduced_axes: tuple[int | None, ...] = ()
    """If operands have two dimensions of rows and the node reduces one of them: for each operand,
    the index of the reduced dimension, None if it has none. Otherwise ().
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node, its operands (names of values of the graph), and the facts and types of the operands.
    A fact is what is known of a value whose shape or elements depend on data.
    """

    node: onnx.NodeProto
    operands: tuple[str, ...]
    facts: tuple[Fact | None, ...]
    """The fact of each operand, what is known of it if its shape or elements depend on data; None
    for a static operand.
    """
    types: Mapping[str, Value]
    """Types of the static values of the graph, by name."""
    arrays: Mapping[str, np.ndarray]
    """The static values whose elements are known before running, by name."""
    inference: Inference
    opset: int
    row_axes_cache: dict[object, RowAxes]
    """Results of `row_axes`, by node and operands: many nodes of a file are equal."""
    derived_selections: dict[object, Selection]
    """Selections that were made from other selections, by their root: a name for the sequence of
    their mask's elements.

    There are two more kinds of keys. (key of another selection, scale, offset) stands for a
    selection that has `scale * n + offset` rows, where n is the number of rows of the other one.
    The keys and sizes of several parts stand for the selection of their concatenated rows.
    """
    results: dict[str, Fact] = field(default_factory=dict)
    """Facts about the node's results, by name, if their shape or elements depend on data. The
    laws (functions that write a node with static shapes) add these facts.
    """

    @property
    def title(self) -> str:
        """Operator and name of the node, for messages."""
        return f"{self.node.op_type} {self.node.name!r}"

    def fact(self, slot: int) -> Fact | None:
        """Return the fact of operand `slot`: what is known of it if its shape or elements depend on
        data. None if the operand is static or absent.
        """
        return self.facts[slot] if slot < len(self.facts) else None

    def integer(self, name: str, default: int = 0) -> int:
        """Return the integer attribute `name`, `default` if the node does not have it."""
        return next((int(each.i) for each in self.node.attribute if each.name == name), default)

    def has_attribute(self, name: str) -> bool:
        """True if the node has the attribute `name`."""
        return any(each.name == name for each in self.node.attribute)

    def unsupported_error(self) -> ModelError:
        """Return the error that says that the node combines rows that data select in an unsupported
        way.
        """
        selections = (each.selection.node for each in self.facts if each is not None)
        return ModelError(
            f"the node combines rows that {next(selections, 'another node')} selects depending "
            "on data, so the shape of the result is unknown",
            hint="compute the selected rows independently, then sum the results or scatter them "
            "into a tensor",
            where=self.title,
        )

    def operand_numbers(self) -> list[Number]:
        """Return, for each operand, its elements: an array if they are known before running, a
        `SizeArray` if they are polynomials in n, the number of rows that data select; otherwise
        None.
        """
        return [
            each.numbers
            if isinstance(each, CountedNumbers)
            else self.arrays.get(name)
            if name
            else None
            for name, each in zip(self.operands, self.facts, strict=True)
        ]

    def operand_number(self, slot: int) -> Number:
        """Return the elements of operand `slot`: an array if they are known before running, a
        `SizeArray` if they are polynomials in n, the number of rows that data select; otherwise
        None.
        """
        return self.operand_numbers()[slot] if slot < len(self.operands) else None

    def operand_numbers_for(self, count: int) -> list[np.ndarray | None]:
        """Return, for each operand, its elements as they are if data select `count` rows; None if
        they are not known.
        """
        return [
            each if each is None or isinstance(each, np.ndarray) else each.value_at(count)
            for each in self.operand_numbers()
        ]

    def evaluate_row(
        self, arrays: Sequence[np.ndarray | None], types: Sequence[Value]
    ) -> tuple[np.ndarray, ...] | None:
        """Return the results that the node has for the operands `arrays`, which have one row.
        `types` are the result types as if data selected `WITNESS` rows. None if the evaluator
        cannot compute them.
        """
        one_row = [
            Value(
                "", each.dtype, tuple(1 if extent == WITNESS else extent for extent in each.shape)
            )
            for each in types
        ]
        return self.inference.evaluate(self.node, tuple(arrays), one_row)

    def row_axes(self) -> RowAxes:
        """Return the dimensions of the results that count rows selected by data."""
        types = [*map(self._operand_type, self.operands, self.facts)]
        numbers = self.operand_numbers_for(WITNESS)
        kinds = tuple(None if each is None else (each.dtype, each.shape) for each in types)
        axes = tuple(map(row_axes_of, self.facts))
        contents = tuple(None if each is None else cached_content(each) for each in numbers)
        key = (*node_key(self.node), kinds, axes, contents)
        if key not in self.row_axes_cache:
            self.row_axes_cache[key] = self._follow_rows(types, numbers)
        return self.row_axes_cache[key]

    def _follow_rows(
        self, types: Sequence[Value | None], known: Sequence[np.ndarray | None]
    ) -> RowAxes:
        """Return the dimensions of the results that count rows selected by data. They are found
        through the node's iteration space: the axes over which it loops, and the dimension of each
        operand and result that an axis is. `types` and `known` are the operands' types and elements
        as if data selected `WITNESS` rows.

        The node computes each row separately if the axis that counts rows is parallel and is a
        dimension of every result. If operands have two dimensions of selected rows, this must hold
        for one of their axes. Otherwise the returned `RowAxes` has no `axes`.
        """
        inferred = self.inference.types(self.node, tuple(zip(types, known, strict=True)))
        results = [each for each in inferred if each is not None]
        if len(results) < sum(map(bool, self.node.output)):
            raise self.unsupported_error()
        space = self._iteration_space(types, inferred, known)
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
            (_index_of(dimensions, row), _index_of(dimensions, pair))
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
        reduced_axes = tuple(_index_of(each or (), pair) for each in space.operands)
        return RowAxes(results, axes, pair_axes, reduced_axes)

    def _operand_type(self, name: str, fact: Fact | None) -> Value | None:
        """Return the type of the operand `name`, as if data selected `WITNESS` rows; None if the
        operand is absent (""). `fact` is what is known of it, None if it is static.
        """
        if fact is not None:
            return witness_type(fact)
        return self.types[name] if name else None

    def _iteration_space(
        self,
        types: Sequence[Value | None],
        results: Sequence[Value | None],
        known: Sequence[np.ndarray | None],
    ) -> Space:
        """Return the iteration space of the node as if data selected `WITNESS` rows: the axes over
        which it loops, and the dimension of each operand and result that an axis is. `types` and
        `known` are the types and elements of the operands, `results` the types of the results.
        Raises ModelError for an operator without definition.
        """
        node = self.node
        domain = "" if node.domain == "ai.onnx" else node.domain
        operator = OPERATORS.get(f"{domain}.{node.op_type}" if domain else node.op_type)
        if operator is None:
            raise self.unsupported_error()
        typed_node = Node(
            node.name, node.op_type, self.operands, tuple(node.output), attributes_of(node), domain
        )
        return operator.space(
            Signature(typed_node, tuple(types), tuple(results), tuple(known), self.opset)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext(NodeFacts):
    """A node that is replaced, what is known of its operands, and the writer of the nodes that
    replace it.
    """

    write: RowWriter


def _index_of(dimensions: Sequence[object], name: object) -> int | None:
    """Return the index of `name` in `dimensions`, None if it is not there."""
    return next((place for place, each in enumerate(dimensions) if each == name), None)


def make_selection(
    context: NodeFacts,
    mask: str,
    mask_shape: Sequence[int],
    shape: tuple[int, ...],
    root: str = "",
) -> Selection:
    """Return the `Selection` of the true elements of `mask`, whose shape `mask_shape` is broadcast
    to `shape`. The node of `context` selects them; `root` is a name for the mask's elements. Raises
    ModelError if the mask has no elements.
    """
    if not shape or math.prod(shape) == 0:
        raise ModelError(
            f"the mask has the shape {list(shape)}, so it selects no element",
            where=context.title,
        )
    return Selection(mask, tuple(mask_shape), shape, context.title, root)
