"""Builds an ONNX graph one operator at a time, with hierarchical names and a type and shape for every value."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

IR_VERSION: Final = 10
"""The first version of the format that carries opset 20 and 21; every reader of those opsets knows it."""

Attribute: TypeAlias = int | float | str | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class Initializer:
    """How a parameter's values are drawn before training."""

    scheme: Literal["normal", "uniform", "zeros", "ones"]
    """Its distribution, with mean 0 where it is random."""

    scale: float = 0.0
    """The standard deviation of `normal`, the half-width of `uniform`; unused otherwise."""

    def described(self) -> dict[str, str | float]:
        """The entry of the model's `autopipe.init` metadata."""
        match self.scheme:
            case "normal":
                return {"scheme": "normal", "std": self.scale}
            case "uniform":
                return {"scheme": "uniform", "bound": self.scale}
            case _:
                return {"scheme": self.scheme}


ZEROS: Final = Initializer("zeros")
ONES: Final = Initializer("ones")


def normal(std: float) -> Initializer:
    """A normal distribution of standard deviation `std`."""
    return Initializer("normal", std)


def uniform(bound: float) -> Initializer:
    """A uniform distribution over [-bound, bound]."""
    return Initializer("uniform", bound)


def kaiming(fan_in: int) -> Initializer:
    """He et al. (2015): keeps the variance of activations through layers that end in a ReLU."""
    return normal(math.sqrt(2.0 / fan_in))


def lecun(fan_in: int) -> Initializer:
    """LeCun et al. (1998): keeps the variance of activations through a linear layer."""
    return normal(math.sqrt(1.0 / fan_in))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A float32 parameter: its name, shape and how it is initialised."""

    name: str
    shape: tuple[int, ...]
    initializer: Initializer

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class GraphBuilder:
    """Collects nodes, parameters, inputs and outputs; `finish` gives the graph with parameters that have no data.

    `batch` is the extent of axis 0 of every input, an integer or the name of a symbolic dimension. Parameters are
    values that nothing produces: whoever saves the model gives them data, or leaves them dangling.
    """

    def __init__(self, name: str, batch: int | str, opset: int) -> None:
        self.batch = batch
        self._name = name
        self._opset = opset
        self._scopes: list[str] = []
        self._names: Counter[str] = Counter()
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._parameters: dict[str, Parameter] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put what is made inside under `name`: `/name/…` for nodes, `name.…` for parameters."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def input(self, name: str, *dims: int, integer: bool = False) -> ir.Value:
        """A data input [batch, *dims], int64 where `integer`, float32 otherwise."""
        dtype = ir.DataType.INT64 if integer else ir.DataType.FLOAT
        value = ir.Value(name=name, shape=ir.Shape([self.batch, *dims]), type=ir.TensorType(dtype))
        self._inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value) -> None:
        """Make `value` a result of the graph and call it `name`."""
        value.name = name
        self._outputs.append(value)

    def parameter(self, name: str, *dims: int, init: Initializer) -> ir.Value:
        """A trainable tensor [*dims] named after the scopes it stands in."""
        full_name = ".".join([*self._scopes, name])
        assert full_name not in self._parameters, f"two parameters are called {full_name}"
        self._parameters[full_name] = Parameter(full_name, dims, init)
        return ir.Value(name=full_name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))

    def constant(self, value: float | Sequence[float]) -> ir.Value:
        """A Constant node: a scalar or vector, int64 of whole numbers and float32 of others."""
        array = np.asarray(value)
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        return self._node("Constant", (), {"value": ir.tensor(array)}, 1)[0]

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Attribute) -> ir.Value:
        """Append an operator and return its only (or first) output."""
        return self._node(op_type, inputs, attributes, 1)[0]

    def split_op(self, op_type: str, outputs: int, *inputs: ir.Value, **attributes: Attribute) -> tuple[ir.Value, ...]:
        """Append an operator with several outputs and return them all."""
        return self._node(op_type, inputs, attributes, outputs)

    def reshape(self, data: ir.Value, target: Sequence[int]) -> ir.Value:
        """Reshape to `target`, where 0 keeps an axis."""
        return self.op("Reshape", data, self.constant(target))

    def flatten(self, data: ir.Value, positions: int, *dims: int, integer: bool = False) -> ir.Value:
        """[batch, positions, *dims] -> [batch * positions, *dims], of int64 where `integer`.

        Inference gives the product with a symbolic batch no name, so its shape is said here.
        """
        result = self.reshape(data, [-1, *dims])
        rows = self.batch * positions if isinstance(self.batch, int) else f"{self.batch}*{positions}"
        result.shape = ir.Shape([rows, *dims])
        result.type = ir.TensorType(ir.DataType.INT64 if integer else ir.DataType.FLOAT)
        return result

    def finish(self, metadata: dict[str, str]) -> tuple[onnx.ModelProto, tuple[Parameter, ...]]:
        """The model, every value typed and shaped, without the data of its parameters; and these parameters."""
        graph = ir.Graph(
            self._inputs, self._outputs, nodes=self._nodes, opset_imports={"": self._opset}, name=self._name
        )
        parameters = tuple(self._parameters.values())
        initial = {parameter.name: parameter.initializer.described() for parameter in parameters}
        properties = {
            **metadata,
            "autopipe.parameters": json.dumps([parameter.name for parameter in parameters]),
            "autopipe.init": json.dumps(initial),
        }
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="autopipe", metadata_props=properties)
        proto = ir.to_proto(model)
        for parameter in parameters:
            proto.graph.value_info.append(
                onnx.helper.make_tensor_value_info(parameter.name, onnx.TensorProto.FLOAT, parameter.shape)
            )
        return onnx.shape_inference.infer_shapes(proto, strict_mode=True), parameters

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Attribute] | dict[str, ir.TensorProtocol],
        outputs: int,
    ) -> tuple[ir.Value, ...]:
        """Append a node named `/scopes/OpType`, numbered from the second of that name on."""
        name = "/" + "/".join([*self._scopes, op_type])
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}_{self._names[name] - 1}"
        results = [ir.Value(name=f"{name}_output_{index}") for index in range(outputs)]
        self._nodes.append(ir.node(op_type, inputs, attributes=attributes, outputs=results, name=name))
        return tuple(results)
