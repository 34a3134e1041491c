"""The loss of a graph: an output of the model, or a cross-entropy added after one of its values."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Attribute, DType, Graph, Node, Value
from autopipe.ir.ops import is_label_loss, operators_with
from autopipe.passes.frontend.model import only_reached
from autopipe.passes.frontend.rewriter import GraphEdit


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross-entropy between logits and labels.

    `logits` names a value of shape (samples, …, classes). `labels` names the int64 input of that
    shape without the classes; the input is added if the model has no input of that name. The mean
    is over all positions. Dimensions of size 1 after the classes are ignored, because convolutional
    networks may end in (samples, classes, 1, 1).
    """

    logits: str
    labels: str = "labels"
    ignored: int | None = None
    """Label that is ignored in the loss; None if all labels count."""


_SAME = operators_with(lambda row: row.same_elements) | {"Cast"}


def leaves_out(graph: Graph, node: Node) -> bool:
    """True if a loss may ignore labels. False if the labels are constants without the ignored
    label, or if their type cannot represent it.
    """
    if not node.has("ignore_index"):
        return False
    ignored = node.integer("ignore_index")
    name = node.inputs[1]
    while True:
        dtype = graph.type_of(name).dtype
        constant = graph.constant(name)
        index = graph.producer(name)
        if (
            dtype is DType.BOOL
            or not np.iinfo(dtype.value).min <= ignored <= np.iinfo(dtype.value).max
        ):
            return dtype is DType.BOOL and ignored in (0, 1)
        if constant is not None:
            return bool(np.any(constant.array == ignored))
        if index is None or graph.nodes[index].op not in _SAME:
            return True
        name = graph.nodes[index].inputs[0]


def loss_choices(graph: Graph) -> tuple[str, ...]:
    """Return the outputs that can be the loss of the model.

    An output called 'loss' is the only choice. Otherwise the choices are the floating-point outputs
    of one element that a loss operator writes, and the scalars through which a parameter can be
    trained.
    """
    numbers = [name for name in graph.outputs if _is_scalar(graph.type_of(name))]
    if "loss" in numbers:
        return ("loss",)
    return tuple(
        name for name in numbers if _is_written_by_loss(graph, name) or _trains(graph, name)
    )


def own_loss(graph: Graph) -> str:
    """Return the only output that can be the loss; "" if there is none, or if there are several."""
    choices = loss_choices(graph)
    return choices[0] if len(choices) == 1 else ""


def _is_written_by_loss(graph: Graph, name: str) -> bool:
    index = graph.producer(name)
    return index is not None and is_label_loss(graph.nodes[index])


def _trains(graph: Graph, name: str) -> bool:
    """True if `name` is a scalar with a gradient for a trainable parameter. A tensor of shape other
    than () does not count, because it may be the logit of a batch of one sample.
    """
    is_scalar = graph.type_of(name).shape == ()
    return is_scalar and any(each.trainable for each in only_reached(graph, name).parameters)


def require_loss(graph: Graph, name: str) -> None:
    """Raise ConfigurationError unless `name` is an output that can be a loss."""
    if name not in graph.outputs:
        near = difflib.get_close_matches(name, graph.outputs, n=1) or list(graph.outputs)
        raise ConfigurationError(
            f"loss names {name!r}, which is not an output of the model",
            hint=f"use {' or '.join(map(repr, near))}",
        )
    value = graph.type_of(name)
    if not _is_scalar(value):
        raise ConfigurationError(
            (
                f"loss names output {name!r} of type {value.dtype.value}{list(value.shape)}, "
                "expected one floating-point number"
            ),
            hint="set loss.cross_entropy: {logits: NAME, labels: NAME} to add a cross-entropy loss",
        )


def with_cross_entropy(graph: Graph, choice: CrossEntropy) -> tuple[Graph, str]:
    """Return the graph with the loss of the logits as an additional output, and the name of that
    output.
    """
    known = {value.name for value in graph.values}
    if choice.logits not in known:
        near = difflib.get_close_matches(choice.logits, [*graph.outputs, *known], n=1) or list(
            graph.outputs
        )
        raise ConfigurationError(
            f"loss.cross_entropy names the logits {choice.logits!r}, which are not a value of "
            "the model",
            hint=f"did you mean {', '.join(map(repr, near))}?",
        )
    logits = graph.type_of(choice.logits)
    if not logits.dtype.is_floating or len(logits.shape) < 2:
        raise ConfigurationError(
            (
                f"loss.cross_entropy names the logits {choice.logits!r} of type "
                f"{logits.dtype.value}{list(logits.shape)}, expected floating-point values of "
                "two or more dimensions"
            ),
            hint="use logits of shape (samples, classes) or (samples, positions, classes)",
        )
    counted = logits.shape
    while len(counted) > 2 and counted[-1] == 1:
        counted = counted[:-1]
    labels = Value(choice.labels, DType.INT64, counted[:-1])
    graph = _with_labels(graph, labels, choice.logits)
    added = GraphEdit(graph)
    nodes = list(graph.nodes)

    def append(
        op: str, inputs: tuple[str, ...], result: str, *attributes: tuple[str, Attribute]
    ) -> str:
        nodes.append(Node(f"autopipe/{op}/{result}", op, inputs, (result,), attributes))
        return result

    def rows(value: Value, *columns: int) -> str:
        shape = (math.prod(labels.shape), *columns)
        operands = (value.name, added.shape_operand(value.name, shape))
        return append("Reshape", operands, added.value(f"{value.name}_rows", value.dtype, shape))

    # ONNX's loss requires the classes on axis 1.
    scores = rows(logits, counted[-1]) if len(logits.shape) > 2 else logits.name
    targets = rows(labels) if len(labels.shape) > 1 else labels.name
    loss = added.value("loss", logits.dtype, ())
    ignored = () if choice.ignored is None else (("ignore_index", choice.ignored),)
    append("SoftmaxCrossEntropyLoss", (scores, targets), loss, *ignored, ("reduction", "mean"))
    return dataclasses.replace(added.build(nodes), outputs=(*graph.outputs, loss)), loss


def _is_scalar(value: Value) -> bool:
    return value.dtype.is_floating and value.elements == 1


def _with_labels(graph: Graph, labels: Value, logits: str) -> Graph:
    for value in graph.inputs:
        if value.name == labels.name:
            if value.dtype not in (DType.INT64, DType.INT32) or value.shape != labels.shape:
                raise ConfigurationError(
                    f"loss.cross_entropy names the labels {value.name!r} of type "
                    f"{value.dtype.value}{list(value.shape)}, but logits {logits!r} need "
                    f"int64{list(labels.shape)}"
                )
            return graph
    # The batch dimension of the labels is the first axis of the logits.
    axes = (*graph.batch_axes, (labels.name, 0)) if graph.batch_axes else ()
    return dataclasses.replace(graph, inputs=(*graph.inputs, labels), batch_axes=axes)
