"""An ONNX model and one set of its inputs as a graph, node by node and without cleaning.

The product's frontend folds and rewrites, which would leave a case of one node nothing to emit.
Here every node that an output depends on stays. The one thing done is what emission demands:
operands that a row calls static become constants, evaluated from the inputs by onnx's reference
implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.inliner import inline_selected_functions

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, Graph, Initializer, Node, Parameter, Value
from autopipe.ir.ops import OPERATORS, operator_of
from autopipe.passes.frontend.elements import attributes_of, dtype_of
from autopipe.passes.frontend.inference import Inference


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph, and the numbers of its parameters in their order."""

    graph: Graph
    weights: tuple[np.ndarray, ...]


def import_model(model: onnx.ModelProto, arrays: Sequence[np.ndarray]) -> Imported:
    """The graph of `model` for these inputs. Raises ModelError for what has no row."""
    return _Importer(_expanded(model), arrays).run()


def _expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with functions inlined: its own, and ONNX's where an operator without a row is
    defined by one.
    """
    ours = [tuple(name.rpartition(".")[::2]) for name in OPERATORS]
    return inline_selected_functions(model, [*ours], exclude=True, inline_schema_functions=True)


@dataclass(slots=True)
class _Importer:
    model: onnx.ModelProto
    arrays: Sequence[np.ndarray]
    types: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    parameters: list[tuple[Parameter, np.ndarray]] = field(default_factory=list)
    written: dict[str, onnx.NodeProto] = field(default_factory=dict)
    inference: Inference = field(init=False)

    def run(self) -> Imported:
        graph = self.model.graph
        opsets = tuple((each.domain, each.version) for each in self.model.opset_import)
        self.inference = Inference(opsets)
        inputs = self._inputs()
        for initializer in graph.initializer:
            if initializer.name not in self.types:
                self._hold(initializer.name, initializer)
        nodes = [
            self._node(node, index)
            for index, node in enumerate(graph.node)
            if not self._literal(node)
        ]
        outputs = tuple(each.name for each in graph.output)
        kept = tuple(_needed(nodes, outputs))
        written = [name for node in kept for name in node.outputs if name]
        built = Graph(
            name=graph.name,
            opset=dict(opsets).get("", dict(opsets).get("ai.onnx", 1)),
            inputs=tuple(each for each in inputs if each.name not in self.constants),
            parameters=tuple(parameter for parameter, _ in self.parameters),
            constants=tuple(self.constants.values()),
            nodes=kept,
            outputs=outputs,
            values=tuple(self.types[name] for name in written),
        )
        built.verify()
        return Imported(built, tuple(array for _, array in self.parameters))

    def _inputs(self) -> tuple[Value, ...]:
        held = {initializer.name for initializer in self.model.graph.initializer}
        names = [each.name for each in self.model.graph.input if each.name not in held]
        if len(self.arrays) > len(names):
            names = [each.name for each in self.model.graph.input]
        found = []
        for name, array in zip(names, self.arrays, strict=True):
            number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            found.append(Value(name, dtype_of(number, repr(name)), array.shape))
            self.types[name] = found[-1]
            self.numbers[name] = array
        return tuple(found)

    def _hold(self, name: str, tensor: onnx.TensorProto) -> None:
        array = np.array(numpy_helper.to_array(tensor))
        value = Value(name, dtype_of(tensor.data_type, repr(name)), array.shape)
        self.types[name], self.numbers[name] = value, array
        if value.dtype.is_floating and array.size > 1:
            self.parameters.append((Parameter(value, Initializer("zeros")), array))
        else:
            self.constants[name] = Constant(value, array)

    def _literal(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a Constant that holds a tensor; it is then taken over as a constant."""
        if node.op_type != "Constant" or node.attribute[0].name != "value":
            return False
        array = np.array(numpy_helper.to_array(node.attribute[0].t))
        value = Value(
            node.output[0], dtype_of(node.attribute[0].t.data_type, node.name), array.shape
        )
        self.types[value.name], self.numbers[value.name] = value, array
        self.constants[value.name] = Constant(value, array)
        return True

    def _node(self, proto: onnx.NodeProto, index: int) -> Node:
        names = list(proto.input)
        while names and not names[-1]:
            names.pop()
        outputs = list(proto.output)
        while outputs and not outputs[-1]:
            outputs.pop()
        node = Node(
            name=proto.name or f"{proto.op_type} {index}",
            op=proto.op_type,
            inputs=tuple(names),
            outputs=tuple(outputs),
            attributes=attributes_of(proto),
            domain="" if proto.domain == "ai.onnx" else proto.domain,
        )
        row = operator_of(node)
        if row is None:
            raise ModelError(f"operator {node.domain}:{node.op} is not supported")
        fixed = [
            self._fix(name) if name and place in row.static else name
            for place, name in enumerate(node.inputs)
        ]
        self.written.update(dict.fromkeys(proto.output, proto))
        self._infer(proto, fixed, node.name)
        return replace(node, inputs=tuple(fixed))

    def _fix(self, name: str) -> str:
        """The name of a constant with the numbers of `name`."""
        if name in self.constants:
            return name
        array = np.array(self._evaluate(name))
        known = Value(f"{name} (known)", self.types[name].dtype, array.shape)
        self.types[known.name], self.constants[known.name] = known, Constant(known, array)
        return known.name

    def _evaluate(self, name: str) -> np.ndarray:
        """The numbers of a value under these inputs."""
        if name not in self.numbers:
            proto = self.written[name]
            operands = tuple(self._evaluate(each) if each else None for each in proto.input)
            types = tuple(self.types.get(each) if each else None for each in proto.output)
            results = self.inference.evaluate(proto, operands, types)
            if results is None:
                raise ModelError(f"{proto.op_type} cannot be evaluated", where=repr(name))
            for each, array in zip(proto.output, results, strict=False):
                self.numbers[each] = array
        return self.numbers[name]

    def _infer(self, proto: onnx.NodeProto, inputs: Sequence[str], where: str) -> None:
        absent = [""] * (len(proto.input) - len(inputs))
        operands = tuple(
            (self.types[name], self.constants[name].array if name in self.constants else None)
            if name
            else (None, None)
            for name in (*inputs, *absent)
        )
        found = self.inference.types(proto, operands)
        for name, value in zip(proto.output, found, strict=True):
            if not name:
                continue
            if value is None:
                array = self._evaluate(name)
                number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                value = Value(name, dtype_of(number, where), array.shape)
            self.types[name] = Value(name, value.dtype, value.shape)


def _needed(nodes: list[Node], outputs: Sequence[str]) -> Iterator[Node]:
    """The nodes that outputs depend on, in their order; what only told static operands goes."""
    wanted = set(outputs)
    kept = set()
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            kept.add(node.name)
            wanted.update(node.inputs)
    return (node for node in nodes if node.name in kept)
