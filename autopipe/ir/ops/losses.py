"""Losses over classes (axis 1) and labels."""

from __future__ import annotations

import math

from autopipe.ir.ops.lines import spell
from autopipe.ir.ops.row import Line, Operator, Signature
from autopipe.ir.space import Space


def reduction(signature: Signature) -> str:
    """`none`, `mean` or `sum`."""
    return signature.node.text("reduction", "mean")


def weighs_labels(signature: Signature) -> bool:
    """Whether the mean divides by something else than the number of labels, so that means of parts do not average."""
    return reduction(signature) == "mean" and (signature.present(2) or signature.node.has("ignore_index"))


def class_loss(signature: Signature) -> Line:
    """`n c *d, n *d, 1 -> n *d`, or a scalar that adds up or averages over n and *d; the second result is `n c *d`.

    Devices with a part of the classes each give the loss of the labels in their part.
    """
    shape = signature.operand(0).shape
    mark = {"none": "", "sum": "+", "mean": "!" if weighs_labels(signature) else "~"}[reduction(signature)]
    labels = [f"n{mark}", *(f"d{axis}{mark}" for axis in range(len(shape) - 2))]
    scores = [labels[0], "c&", *labels[1:]]
    weights = [["1"]] if signature.present(2) else []
    loss = labels if reduction(signature) == "none" else []
    results = [loss, *(None if value is None else scores for value in signature.results[1:])]
    return spell([scores, labels, *weights], results)


def _softmax_flops(signature: Signature, space: Space) -> float:
    return 6.0 * math.prod(signature.operand(0).shape)


def _label_flops(signature: Signature, space: Space) -> float:
    return 2.0 * math.prod(signature.operand(1).shape)


LOSSES = (
    Operator(
        "SoftmaxCrossEntropyLoss",
        class_loss,
        "normalization",
        _softmax_flops,
        1.0,
        ("0",),
        mixes_samples=weighs_labels,
        joint=(2, 1),
    ),
    Operator(
        "NegativeLogLikelihoodLoss", class_loss, "reduction", _label_flops, 1.0, ("1",), mixes_samples=weighs_labels
    ),
)
