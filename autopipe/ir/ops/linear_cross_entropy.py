"""The cross-entropy of scores that a product makes, which are in memory a block of classes at a
time.

Operands are x, labels and class weights as SoftmaxCrossEntropyLoss has them, x [*labels, features]
in place of scores, and behind them the product's weight, [features, classes] or with `transB` the
other way round, and its bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopipe.ir.ops.normalization import class_statistics, loss_mark, reduction, weighs_labels
from autopipe.ir.ops.operator import Operator, Signature, Statistic, notate
from autopipe.ir.space import Space

LINEAR_CROSS_ENTROPY = "autopipe.LinearCrossEntropy"
WEIGHT = 3
BIAS = 4
"""Their places among the operands."""
CLASSES_AT_ONCE = 4096
"""Classes of a block. With fewer, adding up the gradient of x, block by block, costs as much as its
product: on a GPU that does 300 FLOPs while it moves a byte, the 12 bytes an element of x and block
are worth 1,800 classes. On a CPU 2,048 and 8,192 took as long.
"""


def classes_of(signature: Signature) -> int:
    """Classes of the weight, or of one device's part of it."""
    return signature.operand(WEIGHT).shape[0 if signature.node.integer("transB") else 1]


def score_extents(space: Space, degrees: Mapping[str, int]) -> tuple[int, int]:
    """Numbers of labels and of classes of one device."""
    local = {axis.name: axis.size // degrees.get(axis.name, 1) for axis in space.axes}
    return math.prod(extent for name, extent in local.items() if name not in ("c", "k")), local["c"]


def scratch_bytes(space: Space, degrees: Mapping[str, int], width: int, narrow: bool) -> int:
    """Bytes of a block's scores on one device, `width` each; where products are `narrow`, of their
    copy in 16 bits and of the sum of the gradient of x besides.
    """
    labels, classes = score_extents(space, degrees)
    block = labels * min(classes, CLASSES_AT_ONCE) * (width + 2 * narrow)
    return block + narrow * labels * space.axis("k").size * width


def _linear_cross_entropy(signature: Signature) -> Space:
    """`n *d k!, n *d, 1, k! c&, c -> n *d`, or a scalar, as the loss of classes has it."""
    mark = loss_mark(signature)
    labels = f"n{mark} *d{mark}"
    weight = "c& k!" if signature.node.integer("transB") else "k! c&"
    result = labels if reduction(signature) == "none" else ""
    return notate(signature, [f"{labels} k!", labels, "1", weight, "c"], [result])


def _flops(signature: Signature, space: Space) -> float:
    """A product, and six operations a score."""
    return (2.0 + 6.0 / space.axis("k").size) * space.points


def _statistics(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[Statistic, ...]:
    return class_statistics(signature, space, degrees, (0, WEIGHT, BIAS))


ROWS = (
    Operator(
        LINEAR_CROSS_ENTROPY,
        _linear_cross_entropy,
        "matmul",
        _flops,
        3.0,  # The product again, and one for either gradient.
        ("0", "rows"),
        mixes_samples=weighs_labels,
        statistics=_statistics,
        recomputes=1.0,
    ),
)
