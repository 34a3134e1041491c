"""Definition of a cross-entropy that is fused with the matmul that computes its scores (logits).
Only the scores of one block of classes are in memory at a time.

Operands: x [*labels, features], the labels, the class weights, the weight of the matmul ([features,
classes], or [classes, features] with the attribute `transB`), and the bias of the matmul.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopipe.ir.ops.normalization import (
    class_loss_collectives,
    label_axis_mark,
    loss_reduction,
    may_weight_labels,
)
from autopipe.ir.ops.operator import Operator, OperatorCollective, Signature, space_from_words
from autopipe.ir.space import Space

LINEAR_CROSS_ENTROPY = "autopipe.LinearCrossEntropy"
WEIGHT_OPERAND = 3
"""Operand index of the weight of the matmul."""
BIAS_OPERAND = 4
"""Operand index of the bias of the matmul."""
MAX_CLASSES_PER_BLOCK = 4096
"""Maximum number of classes per block.

Each block adds its part to the gradient of x, which reads and writes 12 bytes per element of x. On
a GPU that computes 300 FLOPs in the time of moving one byte, this takes as long as the matmul of
1,800 classes. On a CPU, blocks of 2,048 and of 8,192 classes took equal time.
"""


def classes_of(signature: Signature) -> int:
    """Return the number of classes in the weight operand. It is the local number if the operand is
    a shard.
    """
    return signature.operand(WEIGHT_OPERAND).shape[0 if signature.node.integer("transB") else 1]


def local_label_and_class_counts(space: Space, degrees: Mapping[str, int]) -> tuple[int, int]:
    """Return (labels, classes): the numbers of labels and of classes on one device. `degrees` has
    the split degree of each axis.
    """
    local = {axis.name: axis.size // degrees.get(axis.name, 1) for axis in space.axes}
    return math.prod(extent for name, extent in local.items() if name not in ("c", "k")), local["c"]


def scratch_bytes(space: Space, degrees: Mapping[str, int], width: int, narrow: bool) -> int:
    """Return the bytes of temporary memory on one device: the scores of one block, with `width`
    bytes per score. If the matmuls are `narrow` (16 bits), also a 16-bit copy of the scores, and
    the accumulated gradient of x.
    """
    labels, classes = local_label_and_class_counts(space, degrees)
    block = labels * min(classes, MAX_CLASSES_PER_BLOCK) * (width + 2 * narrow)
    return block + narrow * labels * space.axis("k").size * width


def _linear_cross_entropy_space(signature: Signature) -> Space:
    """Return the iteration space `n *d k!, n *d, 1, k! c&, c -> n *d` (notation:
    `autopipe.ir.space`): labels n and *d, features k and classes c. With a reduction, the result is
    a scalar.
    """
    mark = label_axis_mark(signature)
    labels = f"n{mark} *d{mark}"
    weight = "c& k!" if signature.node.integer("transB") else "k! c&"
    result = labels if loss_reduction(signature) == "none" else ""
    return space_from_words(signature, [f"{labels} k!", labels, "1", weight, "c"], [result])


def _linear_cross_entropy_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a forward: those of the matmul, and six per score."""
    return (2.0 + 6.0 / space.axis("k").size) * space.points


def _collectives(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[OperatorCollective, ...]:
    """Return the collectives of a split loss, as `class_loss_collectives` does."""
    return class_loss_collectives(signature, space, degrees, (0, WEIGHT_OPERAND, BIAS_OPERAND))


OPERATOR_DEFINITIONS = (
    Operator(
        LINEAR_CROSS_ENTROPY,
        _linear_cross_entropy_space,
        "matmul",
        _linear_cross_entropy_flops,
        # The backward costs three matmuls: one recomputes the logits, and two compute the
        # gradients.
        3.0,
        ("0", "rows"),
        mixes_samples=may_weight_labels,
        statistics=_collectives,
        recomputes=1.0,
        loss=True,
        copied_weights=(WEIGHT_OPERAND,),
        index_range=lambda use, slot: (0, classes_of(use)) if slot == 1 else None,
    ),
)
