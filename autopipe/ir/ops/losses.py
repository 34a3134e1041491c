"""Losses over classes (axis 1) and labels."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopipe.ir.ops.lines import spell
from autopipe.ir.ops.row import NotationLine, Operator, Signature
from autopipe.ir.ops.statistics import Statistic, joint_splits, points, reduced, single
from autopipe.ir.space import Space


def reduction(signature: Signature) -> str:
    """`none`, `mean` or `sum`."""
    return signature.node.text("reduction", "mean")


def weighs_labels(signature: Signature) -> bool:
    """True if the mean divides by something else than the number of labels, so that means of parts do not average."""
    return reduction(signature) == "mean" and (signature.present(2) or signature.node.has("ignore_index"))


def class_loss(signature: Signature) -> NotationLine:
    """`n c *d, n *d, 1 -> n *d`, or a scalar that adds up or averages over n and *d; the second result is `n c *d`.

    Devices with a part of the classes each give the loss of the labels in their part. Where labels have weights, or
    some are left out, devices with a part of the labels each add up the weights that the mean divides by.
    """
    shape = signature.operand(0).shape
    mark = {"none": "", "sum": "+", "mean": "&" if weighs_labels(signature) else "~"}[reduction(signature)]
    labels = [f"n{mark}", *(f"d{axis}{mark}" for axis in range(len(shape) - 2))]
    scores = [labels[0], "c&", *labels[1:]]
    weights = [["1"]] if signature.present(2) else []
    loss = labels if reduction(signature) == "none" else []
    results = [loss, *(None if value is None else scores for value in signature.results[1:])]
    return spell([scores, labels, *weights], results)


def label_axes(signature: Signature) -> tuple[str, ...]:
    """The axes of the labels."""
    return ("n", *(f"d{axis}" for axis in range(len(signature.operand(1).shape) - 1)))


def _weight_statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """The weight of all labels."""
    axes = joint_splits(space, degrees, label_axes(signature))
    return reduced(axes, 1, (single(signature.operand(0).dtype),), ())


def _class_statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """Of each label the largest score and the sum, in backward a sum; and the weight of all labels."""
    width = single(signature.operand(0).dtype)
    labels = points(space, degrees, label_axes(signature))
    classes = reduced(joint_splits(space, degrees, "c"), labels, (width, width), (width,))
    return (*classes, *_weight_statistics(signature, space, degrees))


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
        statistics=_class_statistics,
    ),
    Operator(
        "NegativeLogLikelihoodLoss",
        class_loss,
        "reduction",
        _label_flops,
        1.0,
        ("1",),
        mixes_samples=weighs_labels,
        statistics=_weight_statistics,
    ),
)
