"""The loss of a graph: an output of the model, or a cross-entropy put behind one of its values."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Attribute, Constant, DType, Graph, Node, Value

LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross-entropy between scores and labels.

    `logits` names a value of shape (samples, …, classes), `labels` the int64 input of that shape without the classes,
    which is added where the model has none of that name. The mean is over all positions. Axes of extent 1 behind the
    classes are not counted: convolutional networks may end in (samples, classes, 1, 1).
    """

    logits: str
    labels: str = "labels"


def own_loss(graph: Graph) -> str:
    """The output that is a loss by its name or its operator, "" where there is none."""
    scalars = [name for name in graph.outputs if _is_scalar(graph.type_of(name))]
    written = {name: graph.producer(name) for name in scalars}
    by_operator = [name for name, index in written.items() if index is not None and graph.nodes[index].op in LOSSES]
    return next((name for name in scalars if name == "loss"), "") or next(iter(by_operator), "")


def require_loss(graph: Graph, name: str) -> None:
    """Raise ConfigurationError unless `name` is an output that can be a loss."""
    if name not in graph.outputs:
        near = difflib.get_close_matches(name, graph.outputs, n=1) or list(graph.outputs)
        raise ConfigurationError(f"loss: the model has no output {name!r}", hint=f"it has {', '.join(map(repr, near))}")
    value = graph.type_of(name)
    if not _is_scalar(value):
        raise ConfigurationError(
            f"loss: output {name!r} is {value.dtype.value}{list(value.shape)}, not one floating-point number",
            hint="give cross_entropy: {logits: NAME, labels: NAME} to put a loss behind it",
        )


def with_cross_entropy(graph: Graph, choice: CrossEntropy) -> tuple[Graph, str]:
    """The graph with the loss behind its logits as a further output, and that output's name."""
    known = {value.name for value in graph.values}
    if choice.logits not in known:
        near = difflib.get_close_matches(choice.logits, [*graph.outputs, *known], n=1) or list(graph.outputs)
        raise ConfigurationError(
            f"loss: the model has no value {choice.logits!r}", hint=f"did you mean {', '.join(map(repr, near))}?"
        )
    logits = graph.type_of(choice.logits)
    if not logits.dtype.is_floating or len(logits.shape) < 2:
        raise ConfigurationError(
            f"loss: {choice.logits!r} is {logits.dtype.value}{list(logits.shape)}, no scores of classes",
            hint="logits have the shape (samples, classes) or (samples, positions, classes)",
        )
    counted = _without_ones(logits.shape)
    labels = Value(choice.labels, DType.INT64, counted[:-1])
    graph = _with_labels(graph, labels, choice.logits)
    taken = {*known, *(value.name for value in graph.inputs), *(held.value.name for held in graph.constants)}
    taken |= {parameter.value.name for parameter in graph.parameters}
    builder = _Appender(graph, taken)
    scores, targets = choice.logits, labels.name
    if len(logits.shape) > 2:  # ONNX's loss has the classes on axis 1
        scores = builder.reshape(logits, (math.prod(labels.shape), counted[-1]))
    if len(labels.shape) > 1:
        targets = builder.reshape(labels, (math.prod(labels.shape),))
    mean = (("reduction", "mean"),)
    loss = builder.append("SoftmaxCrossEntropyLoss", (scores, targets), "loss", logits.dtype, (), mean)
    return dataclasses.replace(builder.graph, outputs=(*graph.outputs, loss)), loss


def _is_scalar(value: Value) -> bool:
    return value.dtype.is_floating and value.elements == 1


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of logits without the axes of extent 1 behind the classes."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _with_labels(graph: Graph, labels: Value, logits: str) -> Graph:
    for value in graph.inputs:
        if value.name == labels.name:
            if value.dtype not in (DType.INT64, DType.INT32) or value.shape != labels.shape:
                raise ConfigurationError(
                    f"loss: labels {value.name!r} are {value.dtype.value}{list(value.shape)}, "
                    f"{logits!r} needs int64{list(labels.shape)}"
                )
            return graph
    # Samples are counted by the logits' first axis, whatever the inputs do.
    axes = (*graph.batch_axes, (labels.name, 0)) if graph.batch_axes else ()
    return dataclasses.replace(graph, inputs=(*graph.inputs, labels), batch_axes=axes)


class _Appender:
    """Puts nodes behind a graph under names that are free."""

    def __init__(self, graph: Graph, taken: set[str]) -> None:
        self.graph = graph
        self._taken = taken

    def reshape(self, value: Value, shape: tuple[int, ...]) -> str:
        """Append a Reshape to `shape`."""
        name = self._free(f"{value.name}_shape")
        array = np.asarray(shape, dtype=np.int64)
        constant = Constant(Value(name, DType.INT64, array.shape), array)
        self.graph = dataclasses.replace(self.graph, constants=(*self.graph.constants, constant))
        return self.append("Reshape", (value.name, name), f"{value.name}_rows", value.dtype, shape, ())

    def append(
        self,
        op: str,
        inputs: tuple[str, ...],
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        attributes: tuple[tuple[str, Attribute], ...],
    ) -> str:
        """Append a node with one result, of this type; returns the result's name."""
        result = Value(self._free(name), dtype, shape)
        node = Node(f"autopipe/{op}/{result.name}", op, inputs, (result.name,), attributes)
        self.graph = dataclasses.replace(
            self.graph, nodes=(*self.graph.nodes, node), values=(*self.graph.values, result)
        )
        return result.name

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name
