"""Losses that stand in the graph: labels become an input, the scalar `loss` the only output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopipe.configs.zoo.builder import GraphBuilder

if TYPE_CHECKING:
    import onnx_ir as ir


def classify(graph: GraphBuilder, logits: ir.Value, loss: bool, *positions: int) -> None:
    """End with `logits` [batch, classes, *positions], or with their mean cross-entropy to labels [batch, *positions].

    The labels are int64 classes.
    """
    if not loss:
        graph.output("logits", logits)
        return
    labels = graph.input("labels", *positions, integer=True)
    with graph.scope("loss"):
        graph.output("loss", graph.op("SoftmaxCrossEntropyLoss", logits, labels, reduction="mean"))


def predict_tokens(graph: GraphBuilder, logits: ir.Value, loss: bool, length: int, vocabulary: int) -> None:
    """End with `logits` [batch, length, vocabulary], or with their mean cross-entropy to labels [batch, length].

    Labels stand where their prediction stands: for a causal model they are the tokens moved by one.
    """
    if not loss:
        graph.output("logits", logits)
        return
    labels = graph.input("labels", length, integer=True)
    with graph.scope("loss"):
        flat_logits = graph.flatten(logits, length, vocabulary)
        flat_labels = graph.flatten(labels, length, integer=True)
        graph.output("loss", graph.op("SoftmaxCrossEntropyLoss", flat_logits, flat_labels, reduction="mean"))


def regress(graph: GraphBuilder, prediction: ir.Value, loss: bool, width: int) -> None:
    """End with `prediction` [batch, width], or with its mean squared distance to float labels of the same shape."""
    if not loss:
        graph.output("prediction", prediction)
        return
    labels = graph.input("labels", width)
    with graph.scope("loss"):
        distance = graph.op("Sub", prediction, labels)
        graph.output("loss", graph.op("ReduceMean", graph.op("Mul", distance, distance), keepdims=0))


def click_or_not(graph: GraphBuilder, logits: ir.Value, loss: bool) -> None:
    """End with the probability of `logits` [batch, 1], or with the mean binary cross-entropy to labels 0.0 and 1.0.

    Spelled as softplus(x) - x y, which stays finite where log(sigmoid(x)) does not.
    """
    if not loss:
        graph.output("probability", graph.op("Sigmoid", logits))
        return
    labels = graph.input("labels", 1)
    with graph.scope("loss"):
        entropy = graph.op("Sub", graph.op("Softplus", logits), graph.op("Mul", logits, labels))
        graph.output("loss", graph.op("ReduceMean", entropy, keepdims=0))
