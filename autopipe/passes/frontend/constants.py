"""Numbers of values that depend on no input and no parameter, computed when asked for.

Large ones, such as a causal mask, are not stored in the graph; whoever wants to recognise one asks here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.graph import Graph, Node
from autopipe.passes.frontend.inference import RANDOM, Budget, Inference

if TYPE_CHECKING:
    import onnx


LARGEST = 1 << 26
"""Elements beyond which nothing is computed here."""
MOST_BYTES = 1 << 30
"""Bytes that are held of one graph; what is asked for after them is not known."""


@dataclass(frozen=True, slots=True)
class ConstantFolder:
    """Values that are known while compiling a graph."""

    graph: Graph
    inference: Inference
    known: frozenset[str]
    room: Budget = field(default_factory=lambda: Budget(MOST_BYTES), repr=False, compare=False)
    """Bytes that may still be held."""
    _arrays: dict[str, np.ndarray | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, graph: Graph) -> ConstantFolder:
        """Find the values of `graph` that depend on constants alone."""
        known = {constant.value.name for constant in graph.constants} | {""}
        for node in graph.nodes:
            if node.op not in RANDOM and not node.domain and node.inputs and known.issuperset(node.inputs):
                known.update(node.outputs)
        return cls(graph, Inference((("", graph.opset),)), frozenset(known - {""}))

    def array(self, name: str) -> np.ndarray | None:
        """The numbers of a value; None where they are not known, too many, or beyond the evaluator."""
        if name not in self.known:
            return None
        constant = self.graph.constant(name)
        if constant is not None:
            return constant.array
        waiting = [name]
        while waiting:
            index = self.graph.producer(waiting[-1])
            assert index is not None, f"{waiting[-1]} is neither a constant nor computed"
            node = self.graph.nodes[index]
            missing = [each for each in node.inputs if each and self._pending(each)]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            self._compute(node)
        return self._arrays[name]

    def _pending(self, name: str) -> bool:
        return self.graph.constant(name) is None and name not in self._arrays

    def _held(self, name: str) -> np.ndarray | None:
        constant = self.graph.constant(name)
        return constant.array if constant is not None else self._arrays[name]

    def _compute(self, node: Node) -> None:
        operands = tuple(self._held(name) if name else None for name in node.inputs)
        complete = all(array is not None for name, array in zip(node.inputs, operands, strict=True) if name)
        types = tuple(self.graph.type_of(name) if name else None for name in node.outputs)
        written = [value for value in types if value is not None]
        small = all(value.elements <= LARGEST for value in written)
        computed = complete and small and self.room.takes(sum(value.bytes for value in written))
        results = self.inference.evaluate(node_proto(self.graph, node), operands, types) if computed else None
        for position, name in enumerate(node.outputs):
            if name:
                self._arrays[name] = None if results is None else results[position]


def node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    """ONNX's spelling of a node."""
    import onnx.helper

    from autopipe.passes.frontend.elements import NUMBERS

    attributes = dict(node.attributes)
    proto = onnx.helper.make_node(node.op, node.inputs, node.outputs, name=node.name, domain=node.domain)
    if node.op == "ConstantOfShape" and "value" in attributes:
        number = NUMBERS[graph.type_of(node.outputs[0]).dtype]
        attributes.pop("value")
        tensor = onnx.helper.make_tensor("value", number, [1], [node.number("value")])
        proto.attribute.append(onnx.helper.make_attribute("value", tensor))
    proto.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in sorted(attributes.items()))
    return proto
