"""Normalization of a loss by the number of labels of a step that are not ignored, as in Hugging
Face's trainers.

A mean over the labels of each micro-batch would give all micro-batches equal weight, although their
numbers of counted labels differ. The graph therefore receives two outputs instead: the sum of the
losses of the labels, and the number of counted labels. The ranks add up both over the step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import COUNTED_LABELS, DType, Graph, Node
from autopipe.ir.ops import is_label_loss
from autopipe.passes.frontend.rewriter import GraphEdit

_KEY = "loss.normalize"


def sum_loss_over_labels(graph: Graph, loss: str) -> tuple[Graph, str]:
    """Return (graph, name of the loss). For a mean cross-entropy that ignores labels, the graph
    receives two additional outputs, the sum of the losses and the number of labels that are not
    ignored, and the sum becomes the loss.

    If the loss ignores no label, the graph and the loss are returned unchanged. Raises
    ConfigurationError for another kind of loss and for a loss with class weights.
    """
    index = graph.producer(loss)
    node = None if index is None else graph.nodes[index]
    if node is None or not is_label_loss(node) or node.text("reduction", "mean") != "mean":
        how = "an input" if node is None else f"{node.op} {node.name!r}"
        raise ConfigurationError(
            (
                f"{_KEY}: tokens requires a mean cross-entropy over labels, but the loss "
                f"{loss!r} is computed by {how}"
            ),
            hint=(
                "set loss.output to an output of SoftmaxCrossEntropyLoss, or set loss.cross_entropy"
            ),
        )
    if len(node.inputs) > 2:
        hint = (
            "omit loss.normalize: a loss with class weights is already divided by the sum of "
            "the weights of the full batch"
        )
        raise ConfigurationError(
            f"{_KEY}: tokens requires labels of equal weight, but the loss {loss!r} has class "
            "weights",
            hint,
        )
    if not node.has("ignore_index"):
        return graph, loss
    if graph.has(COUNTED_LABELS):
        raise ConfigurationError(
            f"the model already has a value {COUNTED_LABELS!r}, which is a reserved name",
            hint="rename the value in the model",
        )
    added = GraphEdit(graph)
    labels = graph.type_of(node.inputs[1])
    own = (("ignore_index", node.integer("ignore_index")), ("reduction", "sum"))
    total = added.value(f"{loss}_sum", graph.type_of(loss).dtype, graph.type_of(loss).shape)
    nodes = [
        *graph.nodes,
        Node(f"autopipe/{node.op}/{total}", node.op, node.inputs[:2], (total,), own),
    ]

    def constant(name: str, numbers: object, dtype: DType) -> str:
        """Add a constant and return its name."""
        return added.constant(name, np.asarray(numbers, dtype.value), dtype)

    def append(op: str, inputs: tuple[str, ...], result: str, *attributes: tuple[str, int]) -> str:
        """Add a node with one result and return the name of the result."""
        nodes.append(Node(f"autopipe/{op}/{result}", op, inputs, (result,), attributes))
        return result

    none = constant("ignored_label", node.integer("ignore_index"), labels.dtype)
    ignored = append(
        "Equal", (labels.name, none), added.value("ignored_labels", DType.BOOL, labels.shape)
    )
    counts = append("Not", (ignored,), added.value("labels_count", DType.BOOL, labels.shape))
    numbers = added.value("label_numbers", DType.FLOAT32, labels.shape)
    append("Cast", (counts,), numbers, ("to", 1))
    axes = constant("label_axes", range(len(labels.shape)), DType.INT64)
    append(
        "ReduceSum",
        (numbers, axes),
        added.value(COUNTED_LABELS, DType.FLOAT32, ()),
        ("keepdims", 0),
    )
    return dataclasses.replace(
        added.build(nodes), outputs=(*graph.outputs, total, COUNTED_LABELS)
    ), total
