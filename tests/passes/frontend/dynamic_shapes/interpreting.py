"""Facts of the values of a small graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from autopipe.ir.graph import DType, Node, Value
from autopipe.passes.frontend.decompositions.registry import node_from_proto
from autopipe.passes.frontend.dynamic_shapes.domain import Fact
from autopipe.passes.frontend.dynamic_shapes.interpretation import DynamicShapes
from autopipe.passes.frontend.inference import Inference
from autopipe.passes.frontend.rewriter import FileRewriter
from autopipe.passes.frontend.uses import Uses

OPSET = 20


class Reader:
    """A scope that types every node and computes the results of nodes with known operands."""

    opset = OPSET

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, Value],
        held: Mapping[str, np.ndarray],
        bounds: Mapping[str, int],
    ) -> None:
        self.inference = Inference((("", OPSET),))
        self.dynamic_shapes = DynamicShapes(nodes, self.inference, OPSET, Uses(nodes), bounds)
        self.types = dict(inputs)
        self.arrays: dict[str, np.ndarray] = {}
        for name, array in held.items():
            self.add_constant(Value(name, DType(array.dtype.name), array.shape), array)

    def type_of(self, name: str) -> Value:
        return self.types[name]

    def array(self, name: str) -> np.ndarray | None:
        return self.arrays.get(name)

    def unique_name(self, name: str) -> str:
        return name

    def add_constant(self, value: Value, array: np.ndarray) -> None:
        self.types[value.name] = value
        self.arrays[value.name] = array

    def add(self, node: Node, results: tuple[Value, ...]) -> None:
        attributes: dict[str, Any] = dict(node.attributes)
        made = onnx.helper.make_node(
            node.op, node.inputs, node.outputs, name=node.name, domain=node.domain, **attributes
        )
        self.visit(made)

    def visit(self, node: onnx.NodeProto) -> None:
        operands = tuple(node.input)
        if self.dynamic_shapes.must_replace(
            node, operands, self.types, self.arrays, lambda name: None
        ):
            rewriter = FileRewriter(self, node_from_proto(node, operands), node, self.visit)
            self.dynamic_shapes.replace_node(rewriter, self.types, self.arrays)
            return
        known = tuple(self.arrays.get(name) if name else None for name in operands)
        types = [self.types[name] if name else None for name in operands]
        inferred = self.inference.types(node, tuple(zip(types, known, strict=True)))
        for name, each in zip(node.output, inferred, strict=True):
            if name and each is not None:
                self.types[name] = Value(name, each.dtype, each.shape)
        if all(name in self.arrays for name in operands if name):
            results = self.inference.evaluate(node, known, inferred) or ()
            for name, array in zip(node.output, results, strict=False):
                self.add_constant(Value(name, DType(array.dtype.name), array.shape), array)


def facts_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Value],
    held: Mapping[str, np.ndarray],
    bounds: Mapping[str, int] | None = None,
) -> tuple[dict[str, Fact], dict[str, Value]]:
    """Return the facts of the values that have one, and the types of the static values."""
    reader = Reader(nodes, inputs, held, bounds or {})
    for node in nodes:
        reader.visit(node)
    return dict(reader.dynamic_shapes), reader.types
