"""Small graphs made by hand, and their evaluation by torch, written apart from the product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.ir.graph import Attribute, Constant, DType, Graph, Initializer, Node, Parameter, Value
from tests.distributed.support.layers import LAYERS

OPSET = 21


def _padded(node: Node, x: Tensor, fill: float) -> Tensor:
    pads = node.integers("pads")
    rank = len(pads) // 2
    return F.pad(
        x,
        [pads[axis + side * rank] for axis in reversed(range(rank)) for side in (0, 1)],
        value=fill,
    )


def _conv(node: Node, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    settings = node.integers("strides"), 0, node.integers("dilations"), node.integer("group", 1)
    found: Tensor = getattr(F, f"conv{x.dim() - 2}d")(
        _padded(node, x, 0.0), weight, *(bias or [None]), *settings
    )
    return found


def _max_pool(node: Node, x: Tensor) -> Tensor:
    settings = (
        node.integers("kernel_shape"),
        node.integers("strides"),
        0,
        node.integers("dilations"),
    )
    found: Tensor = getattr(F, f"max_pool{x.dim() - 2}d")(_padded(node, x, -torch.inf), *settings)
    return found


def _average_pool(node: Node, x: Tensor) -> Tensor:
    mean = getattr(F, f"avg_pool{x.dim() - 2}d")
    settings = node.integers("kernel_shape"), node.integers("strides")
    found: Tensor = mean(_padded(node, x, 0.0), *settings)
    if node.integer("count_include_pad"):
        return found
    share: Tensor = mean(_padded(node, torch.ones_like(x), 0.0), *settings)
    return found / share


def _loop(node: Node, *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the final states of a loop without scanned and gathered values."""
    body = node.body
    assert body is not None
    states = operands[: node.integer("states")]
    fixed = operands[node.integer("states") :]
    names = [value.name for value in body.inputs]
    for number in range(node.integer("count")):
        known = dict(zip(names, (torch.tensor(number), *states, *fixed), strict=True))
        found = evaluate(body, known)
        states = tuple(found[name] for name in body.outputs)
    return states


_MEANING: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "Add": lambda node, x, y: x + y,
    "Sub": lambda node, x, y: x - y,
    "Mul": lambda node, x, y: x * y,
    "MatMul": lambda node, x, y: x @ y,
    "Tanh": lambda node, x: torch.tanh(x),
    "Sigmoid": lambda node, x: 1 / (1 + torch.exp(-x)),
    "Relu": lambda node, x: torch.clamp(x, min=0),
    "Conv": _conv,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "Neg": lambda node, x: -x,
    "Identity": lambda node, x: x,
    "Softmax": lambda node, x: torch.softmax(x, node.integer("axis", -1)),
    "Transpose": lambda node, x: x.permute(node.integers("perm")),
    "Reshape": lambda node, x, shape: x.reshape(shape.tolist()),
    "ReduceSum": lambda node, x, axes: x.sum(
        axes.tolist(), keepdim=bool(node.integer("keepdims", 1))
    ),
    "ReduceMean": lambda node, x, axes: x.mean(
        axes.tolist(), keepdim=bool(node.integer("keepdims", 1))
    ),
    "ReduceMax": lambda node, x, axes: x.amax(
        axes.tolist(), keepdim=bool(node.integer("keepdims", 1))
    ),
    "Concat": lambda node, *xs: torch.cat(xs, node.integer("axis")),
    "Split": lambda node, x: torch.chunk(x, node.integer("num_outputs"), node.integer("axis")),
    "Gather": lambda node, x, index: x[index],
    "Loop": _loop,
    "ArgMax": lambda node, x: x.argmax(
        node.integer("axis"), keepdim=bool(node.integer("keepdims", 1))
    ),
    "Greater": lambda node, x, y: x > y,
    "Where": lambda node, c, x, y: torch.where(c, x, y),
    "Cast": lambda node, x: x.to(
        {1: torch.float32, 7: torch.int64, 9: torch.bool, 11: torch.float64}[node.integer("to")]
    ),
    **LAYERS,
}


def evaluate(graph: Graph, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every value of the graph; `known` holds inputs and parameters."""
    found = dict(known)
    for constant in graph.constants:
        found[constant.value.name] = torch.from_numpy(constant.array.copy())
    for node in graph.nodes:
        _apply(node, found)
    return found


def _apply(node: Node, found: dict[str, Tensor]) -> None:
    given = _MEANING[node.op](node, *(found[name] for name in node.inputs))
    results = given if isinstance(given, tuple) else (given,)
    found.update(zip(node.outputs, results, strict=True))


@dataclass(slots=True)
class Builder:
    """A graph that grows; shapes and types are those that torch finds."""

    dtype: DType = DType.FLOAT64
    inputs: list[Value] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    batch_axes: list[tuple[str, int]] = field(default_factory=list)
    sample: dict[str, Tensor] = field(default_factory=dict)
    rename: Callable[[str], str] = str
    """Makes the names that the graph has of `in0`, `w0`, `v0` and the like."""

    def input(
        self, shape: tuple[int, ...], dtype: DType | None = None, batch_axis: int | None = 0
    ) -> str:
        """A graph input of one micro-batch."""
        dtype = dtype or self.dtype
        name = self.rename(f"in{len(self.inputs)}")
        self.inputs.append(Value(name, dtype, shape))
        if batch_axis is not None:
            self.batch_axes.append((name, batch_axis))
        self.sample[name] = torch.zeros(shape, dtype=getattr(torch, dtype.value))
        return name

    def parameter(self, shape: tuple[int, ...], trainable: bool = True) -> str:
        """A parameter drawn from a normal distribution."""
        name = self.rename(f"w{len(self.parameters)}")
        self.parameters.append(
            Parameter(Value(name, self.dtype, shape), Initializer("normal", 0.6), trainable)
        )
        self.sample[name] = torch.zeros(shape, dtype=getattr(torch, self.dtype.value))
        return name

    def constant(self, numbers: object, dtype: DType = DType.INT64) -> str:
        """Numbers known while compiling."""
        array = np.asarray(numbers, dtype=dtype.value)
        name = self.rename(f"k{len(self.constants)}")
        self.constants.append(Constant(Value(name, dtype, array.shape), array))
        self.sample[name] = torch.from_numpy(array.copy())
        return name

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Attribute) -> str:
        """Name of the first result of a new node; the others' follow in `values`."""
        names = tuple(self.rename(f"v{len(self.values) + index}") for index in range(outputs))
        node = Node(
            self.rename(f"n{len(self.nodes)}"), op, inputs, names, tuple(sorted(attributes.items()))
        )
        _apply(node, self.sample)
        self.nodes.append(node)
        for name in names:
            found = self.sample[name]
            self.values.append(
                Value(name, DType(str(found.dtype).removeprefix("torch.")), tuple(found.shape))
            )
        return names[0]

    def loop(self, body: Graph, count: int, states: Sequence[str], fixed: Sequence[str]) -> str:
        """Name of the first final state of a loop of `count` iterations. The body reads the
        iteration number, the states and the `fixed` values, and returns the next states.
        """
        names = tuple(self.rename(f"v{len(self.values) + index}") for index in range(len(states)))
        attributes: dict[str, Attribute] = {
            "count": count, "states": len(states), "scan_axes": (), "scan_directions": (),
            "gather_axes": (), "gather_directions": (),
        }  # fmt: skip
        node = Node(
            self.rename(f"n{len(self.nodes)}"), "Loop", (*states, *fixed), names,
            tuple(sorted(attributes.items())), domain="autopipe", body=body,
        )  # fmt: skip
        _apply(node, self.sample)
        self.nodes.append(node)
        self.values += [Value(name, self.dtype, self.shape(name)) for name in names]
        return names[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return tuple(self.sample[name].shape)

    def mean_square(self, name: str) -> str:
        """The mean of a value's squares, one number."""
        axes = self.constant(list(range(len(self.shape(name)))))
        return self.node("ReduceMean", self.node("Mul", name, name), axes, keepdims=0)

    def graph(self, *outputs: str) -> Graph:
        """The graph that gives `outputs`."""
        found = Graph(
            name=self.rename("graph"),
            opset=OPSET,
            inputs=tuple(self.inputs),
            parameters=tuple(self.parameters),
            constants=tuple(self.constants),
            nodes=tuple(self.nodes),
            outputs=tuple(outputs),
            values=tuple(self.values),
            batch_axes=tuple(self.batch_axes),
        )
        found.verify()
        return found


def mlp(
    layers: int, width: int = 4, batch: int = 4, rename: Callable[[str], str] = str
) -> tuple[Graph, str]:
    """A chain of `layers` products with tanh, two nodes each, then a loss of three more; and the
    loss's name.
    """
    builder = Builder(rename=rename)
    value = builder.input((batch, width))
    for _ in range(layers):
        value = builder.node(
            "Tanh", builder.node("MatMul", value, builder.parameter((width, width)))
        )
    loss = builder.mean_square(value)
    return builder.graph(loss), loss


def names_of(values: Sequence[Value]) -> list[str]:
    """Names, in order."""
    return [value.name for value in values]
