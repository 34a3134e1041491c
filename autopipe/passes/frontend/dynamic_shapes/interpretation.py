"""Visits the nodes of a file in topological order, records the facts of values whose shape depends
on data, and writes nodes of static shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Fact,
    Indices,
    SelectedRows,
    Selection,
)
from autopipe.passes.frontend.dynamic_shapes.indices import to_selected_rows
from autopipe.passes.frontend.dynamic_shapes.laws import apply_laws
from autopipe.passes.frontend.dynamic_shapes.mask_roots import MaskRoots
from autopipe.passes.frontend.dynamic_shapes.node_context import (
    SHAPE_OPERANDS,
    NodeContext,
    NodeFacts,
    RowAxes,
)
from autopipe.passes.frontend.dynamic_shapes.producers import record_range, record_selection
from autopipe.passes.frontend.dynamic_shapes.regrouping import express_by_derived_selection
from autopipe.passes.frontend.dynamic_shapes.row_writer import RowWriter
from autopipe.passes.frontend.dynamic_shapes.size_operators import (
    compute_shape,
    match_mask_count,
    size_results,
    write_numbers,
)
from autopipe.passes.frontend.dynamic_shapes.sizes import MINIMA, SIZE_OPERATORS, SizeArray

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.inference import Inference
    from autopipe.passes.frontend.rewriter import FileRewriter
    from autopipe.passes.frontend.uses import Uses

_SELECTING_OPERAND = {
    "Compress": 1,
    "NonMaxSuppression": 1,
    "NonZero": 0,
    "Range": 1,
    "Unique": 0,
}
"""By operator that selects, the index of the operand whose elements decide which elements, or how
many, are selected.
"""
_SELECTING = _SELECTING_OPERAND.keys() - {"Range"}
_FAILURES = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""Exceptions that numpy and ONNX's evaluator raise if the operands of a node do not fit."""


class DynamicShapes(dict[str, Fact]):
    """By name, the facts (what is recorded) of values whose shape or elements depend on rows that
    data select. Values without a fact are static.
    """

    def __init__(
        self,
        nodes: Iterable[onnx.NodeProto],
        inference: Inference,
        opset: int,
        uses: Uses,
        bounds: Mapping[str, int],
    ) -> None:
        """`nodes` are all nodes of the file, `uses` has the readers of its values. `bounds` has
        maximum numbers of elements of Range results, by name: for each Range whose end is computed
        while running, the model's user must give one.
        """
        super().__init__()
        self._inference = inference
        self._opset = opset
        self._uses = uses
        self._bounds = bounds
        self._roots = MaskRoots(nodes)
        self._static_counts: dict[str, CountedNumbers] = {}
        """Facts of static values of the graph that are known to be polynomials in n, the number of
        elements that a mask selects.
        """
        self._derived_selections: dict[object, Selection] = {}
        self._row_axes_cache: dict[object, RowAxes] = {}

    def must_replace(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
        declared: Callable[[str], Value | None],
    ) -> bool:
        """True if the node must be replaced by nodes of static shapes: it reads a value whose shape
        or elements depend on data (a value with a fact), selects elements by data, or has a size
        operand that is a count of selected elements.

        `types` and `arrays` have the types and the known data of static values. `declared` returns
        the static type that the file states for a value, None if there is none. A selecting
        operator whose result has a static type is not replaced.
        """
        if any(name in self for name in operands):
            return True
        if node.domain not in ("", "ai.onnx"):
            return False
        reads_count = any(name in self._static_counts for name in operands)
        if node.op_type == "ReduceSum" or reads_count:
            return self._is_shaped_by_count(node, operands, types, arrays)
        if node.op_type not in _SELECTING_OPERAND or declared(node.output[0]) is not None:
            return False
        slot = _SELECTING_OPERAND[node.op_type]
        return len(operands) > slot and operands[slot] not in arrays

    def _is_shaped_by_count(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> bool:
        """True if an operand of the node that is a size or a position is a count of selected
        elements. Otherwise the node stays in the graph; if its results are counts, they are
        recorded as such.
        """
        slots = [slot for slot in SHAPE_OPERANDS.get(node.op_type, ()) if slot < len(operands)]
        if any(operands[slot] in self._static_counts for slot in slots):
            return node.op_type != "Slice" or operands[0] not in self._static_counts
        context = self._node_facts(node, operands, types, arrays)
        with contextlib.suppress(ModelError, *_FAILURES):
            if node.op_type == "ReduceSum":
                count = match_mask_count(context, self._roots)
                if count is not None:
                    self._static_counts[node.output[0]] = count
            elif node.op_type in SIZE_OPERATORS - MINIMA:
                selection = next(each.selection for each in context.facts if each is not None)
                for name, each in (size_results(context) or {}).items():
                    if each.degree:
                        self._static_counts[name] = CountedNumbers(selection, each)
        return False

    def replace_node(
        self, rewriter: FileRewriter, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Write the nodes of static shapes that replace the node of `rewriter`, and record what is
        known of its results. `types` and `arrays` have the types and the known data of static
        values. Raises ModelError if the node is not supported.
        """
        context = self._node_context(rewriter, types, arrays)
        try:
            self._interpret(context)
        except _FAILURES as error:
            raise context.unsupported_error() from error
        self.update(context.results)
        operand = context.fact(0)
        result = context.node.output[0]
        if (
            context.node.op_type == "Cast"
            and isinstance(operand, CountedNumbers)
            and result not in self
        ):
            coefficients = [each.astype(np.float64) for each in operand.numbers.coefficients]
            self._static_counts[result] = CountedNumbers(
                operand.selection, SizeArray.from_coefficients(coefficients)
            )

    def _interpret(self, context: NodeContext) -> None:
        """Record the facts of the node's results (what is known of values whose shape depends on
        data), and write the nodes that compute the results.
        """
        operator = context.node.op_type
        if operator in _SELECTING:
            record_selection(context, self._uses, self._roots)
        elif operator == "Range" and not any(context.facts):
            limit = record_range(context, self._roots, self._bounds)
            self._static_counts[context.operands[1]] = limit
        elif operator == "Identity" or (operator == "Concat" and len(context.operands) == 1):
            facts = (each for each in context.facts if each is not None)
            context.results.update((context.node.output[0], each) for each in facts)
        elif operator in ("Shape", "Size"):
            compute_shape(context)
        else:
            apply_laws(context)

    def _node_context(
        self, rewriter: FileRewriter, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
    ) -> NodeContext:
        """Return the node of `rewriter` with the facts of its operands (what is known of values
        whose shape depends on data), and a writer of new nodes.
        """
        facts = self._node_facts(rewriter.proto, rewriter.node.inputs, types, arrays)
        held = {each.name: getattr(facts, each.name) for each in fields(facts)}
        return NodeContext(**held, write=RowWriter(rewriter))

    def _node_facts(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> NodeFacts:
        """Return the node with the facts of its operands (what is known of values whose shape
        depends on data).

        A static operand that is known to be a count of selected elements gets that fact if it is a
        size operand, or if the node computes shapes and no operand has rows.
        """
        facts = [self.get(name) for name in operands]
        slots = [*SHAPE_OPERANDS.get(node.op_type, ())]
        has_rows = any(isinstance(each, Indices | SelectedRows) for each in facts)
        if not has_rows and node.op_type in SIZE_OPERATORS:
            slots += range(len(facts))
        for slot in slots:
            if slot < len(facts) and facts[slot] is None:
                facts[slot] = self._static_counts.get(operands[slot])
        context = NodeFacts(
            node=node,
            operands=operands,
            facts=tuple(facts),
            types=types,
            arrays=arrays,
            inference=self._inference,
            opset=self._opset,
            row_axes_cache=self._row_axes_cache,
            derived_selections=self._derived_selections,
        )
        expressed = [
            express_by_derived_selection(context, each)
            if slot in slots and isinstance(each, CountedNumbers)
            else each
            for slot, each in enumerate(facts)
        ]
        return replace(context, facts=tuple(expressed))

    def write_output(self, rewriter: FileRewriter) -> None:
        """Write an output of the model whose shape or elements depend on data, and remove its fact.
        `rewriter` is for a node whose operand is the output.

        The output has as many rows as data can select: the selected rows first, then zeros. Numbers
        that depend on the count of selected rows are computed while running.
        """
        name = rewriter.required(0)
        context = self._node_context(rewriter, {}, {})
        fact = self.pop(name)
        write = context.write
        if isinstance(fact, CountedNumbers):
            write.node("Identity", [write_numbers(context, name, fact)], name)
            return
        rows = to_selected_rows(write, fact)
        rows = write.fill_unselected(rows, 0, rows.selection.axes)
        if rows.pair_axis is not None:
            if rows.selection.first_rows is None:
                raise context.unsupported_error()
            rows = write.fill_unselected_pairs(rows, 0)
        write.node("Identity", [write.pack(rows).name], name)
