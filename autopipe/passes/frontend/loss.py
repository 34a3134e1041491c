"""The loss of a graph: an output of the model, or a cross-entropy that is added to the graph."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Attribute, DType, Graph, Node, Value
from autopipe.ir.ops import is_label_loss, operators_with
from autopipe.passes.frontend.model import freeze_unreached
from autopipe.passes.frontend.rewriter import GraphEdit


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Request to add the mean cross-entropy between logits and labels to a graph.

    `logits` names a value of shape (samples, …, classes). `labels` names an int64 input of shape
    (samples, …), which is added if the model lacks it. The mean is over all positions whose label
    is not ignored. Dimensions of size 1 after the classes are dropped, because convolutional
    networks may end in (samples, classes, 1, 1).
    """

    logits: str
    labels: str = "labels"
    ignored: int | None = None
    """Positions with this label do not count in the loss. None if all positions count."""


_SAME = operators_with(lambda row: row.same_elements) | {"Cast"}


def may_ignore_labels(graph: Graph, node: Node) -> bool:
    """True if the loss `node` may ignore labels. False if it has no `ignore_index`, if the labels
    are constants other than `ignore_index`, or if their type cannot represent it.
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
    """Return the names of the outputs that can be the loss of the model.

    If there is a floating-point output `loss` with one element, it is the only choice. Otherwise
    the choices are the floating-point outputs with one element that a loss operator writes, and the
    floating-point scalars (shape ()) from which a gradient reaches a trainable parameter.
    """
    numbers = [name for name in graph.outputs if _is_scalar(graph.type_of(name))]
    if "loss" in numbers:
        return ("loss",)
    return tuple(
        name
        for name in numbers
        if _is_written_by_loss(graph, name) or _reaches_parameter(graph, name)
    )


def find_only_loss(graph: Graph) -> str:
    """Return the name of the only output that can be the loss; "" if there is none or more than
    one.
    """
    choices = loss_choices(graph)
    return choices[0] if len(choices) == 1 else ""


def _is_written_by_loss(graph: Graph, name: str) -> bool:
    """True if a loss operator that reads labels writes the value `name`."""
    index = graph.producer(name)
    return index is not None and is_label_loss(graph.nodes[index])


def _reaches_parameter(graph: Graph, name: str) -> bool:
    """True if `name` is a scalar from which a gradient reaches a trainable parameter. A value of
    one element with dimensions is no scalar: it may be the logit of a batch of one sample.
    """
    is_scalar = graph.type_of(name).shape == ()
    return is_scalar and any(each.trainable for each in freeze_unreached(graph, name).parameters)


def require_loss(graph: Graph, name: str) -> None:
    """Raise ConfigurationError unless `name` is an output that can be a loss: one floating-point
    number.
    """
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


def add_cross_entropy(graph: Graph, choice: CrossEntropy) -> tuple[Graph, str]:
    """Return (graph with the cross-entropy `choice` as additional output, name of that output).
    Raises ConfigurationError if the logits or labels do not fit.
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
    graph = _add_labels_input(graph, labels, choice.logits)
    added = GraphEdit(graph)
    nodes = list(graph.nodes)

    def append(
        op: str, inputs: tuple[str, ...], result: str, *attributes: tuple[str, Attribute]
    ) -> str:
        """Add a node with one result, and return the result's name."""
        nodes.append(Node(f"autopipe/{op}/{result}", op, inputs, (result,), attributes))
        return result

    def rows(value: Value, *columns: int) -> str:
        """Add a Reshape of `value` to [samples · positions, `columns` …], and return the name of
        its result.
        """
        shape = (math.prod(labels.shape), *columns)
        operands = (value.name, added.shape_operand(value.name, shape))
        return append("Reshape", operands, added.value(f"{value.name}_rows", value.dtype, shape))

    # ONNX's loss requires the classes on axis 1, so samples and positions are merged into axis 0.
    scores = rows(logits, counted[-1]) if len(logits.shape) > 2 else logits.name
    targets = rows(labels) if len(labels.shape) > 1 else labels.name
    loss = added.value("loss", logits.dtype, ())
    ignored = () if choice.ignored is None else (("ignore_index", choice.ignored),)
    append("SoftmaxCrossEntropyLoss", (scores, targets), loss, *ignored, ("reduction", "mean"))
    return dataclasses.replace(added.build(nodes), outputs=(*graph.outputs, loss)), loss


def _is_scalar(value: Value) -> bool:
    """True if a value is a floating-point tensor with one element."""
    return value.dtype.is_floating and value.elements == 1


def _add_labels_input(graph: Graph, labels: Value, logits: str) -> Graph:
    """Return the graph with the input `labels`. Raises ConfigurationError if it has an input of
    that name with another type.
    """
    for value in graph.inputs:
        if value.name == labels.name:
            if value.dtype not in (DType.INT64, DType.INT32) or value.shape != labels.shape:
                raise ConfigurationError(
                    f"loss.cross_entropy names the labels {value.name!r} of type "
                    f"{value.dtype.value}{list(value.shape)}, but logits {logits!r} need "
                    f"int64{list(labels.shape)}"
                )
            return graph
    # Axis 0 of the labels counts samples, as it does for the logits.
    axes = (*graph.batch_axes, (labels.name, 0)) if graph.batch_axes else ()
    return dataclasses.replace(graph, inputs=(*graph.inputs, labels), batch_axes=axes)
