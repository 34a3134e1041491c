"""Definitions of operators that reduce along axes: normalizations, reductions, and losses over
classes. If such an axis is split, devices exchange statistics. Iteration spaces are written in the
notation of `autopipe.ir.space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopipe.ir.ops.operator import (
    Operator,
    OperatorCollective,
    Range,
    Signature,
    Statistics,
    all_reduces_of_statistics,
    broadcast_words,
    bytes_per_statistic,
    collectives_per_row,
    flops_per_result_element,
    local_point_count,
    mark_words,
    no_collectives,
    nonnegative_axis,
    replace_words,
    space_along_axes,
    space_from_notation,
    space_from_words,
    split_joint_axes,
    stated_axes,
)
from autopipe.ir.space import Space


def uses_batch_statistics(signature: Signature) -> bool:
    """Return True if a node is a BatchNormalization in training mode, which normalizes by the
    statistics of the batch.
    """
    if signature.node.op != "BatchNormalization":
        return False
    # Before opset 14, a BatchNormalization in training mode has several results instead of the
    # attribute `training_mode`.
    if signature.opset >= 14:
        return bool(signature.node.integer("training_mode"))
    return any(value is not None for value in signature.results[1:])


def batch_norm_space(signature: Signature) -> Space:
    """Return the iteration space `n c *i, c, c, c, c -> n c *i, c, c` of a BatchNormalization:
    batch n, channels c, positions *i. In training mode, n and *i are marked `=`, because the
    statistics are those of all devices.
    """
    mark = "=" if uses_batch_statistics(signature) else ""
    first = f"n{mark} c *i{mark}"
    return space_from_words(signature, [first, "c", "c", "c", "c"], [first, "c"])


def normalized_axes(signature: Signature) -> range:
    """Return the axes over which a LayerNormalization or RMSNormalization normalizes: from the
    attribute `axis` to the last.
    """
    return range(signature.axis(-1), signature.rank)


def layer_norm_space(signature: Signature) -> Space:
    """Return the iteration space `*b *x=, *x, *x -> *b *x, *b 1, *b 1` of a layer norm or RMS norm,
    which normalizes over *x. The operands are the data, scale and bias; further results are
    statistics.
    """
    shape = signature.operand(0).shape
    words = signature.words
    axes = normalized_axes(signature)
    scales = [
        broadcast_words(value.shape if value else (), shape, words)
        for value in signature.operands[1:]
    ]
    return space_from_words(
        signature, [mark_words(words, axes, "="), *scales], [words, replace_words(words, axes)]
    )


def group_norm_space(signature: Signature) -> Space:
    """Return the iteration space `n (g c=) *i=, (g c), (g c) -> n (g c) *i` of a
    GroupNormalization: batch n, groups g, channels c per group, positions *i. Before opset 21,
    scale and bias have one element per group.
    """
    groups = signature.node.integer("num_groups")
    channels = signature.operand(0).shape[1]
    scale = "(g c)" if signature.operand(1).shape == (channels,) else "g"
    return space_from_words(
        signature, ["n (g c=) *i=", scale, scale], ["n (g c) *i"], g=groups, c=channels // groups
    )


def mean_variance_axes(signature: Signature) -> tuple[int, ...]:
    """Return the axes over which a MeanVarianceNormalization normalizes, counted from the front."""
    return tuple(
        nonnegative_axis(axis, signature.rank)
        for axis in signature.node.integers("axes", (0, 2, 3))
    )


def softmax_axes(signature: Signature) -> range:
    """Return the axes over which a Softmax, LogSoftmax or Hardmax normalizes: the axis `axis` from
    opset 13 on; before, all axes from `axis` to the last.
    """
    if signature.opset < 13:
        return range(signature.axis(1), signature.rank)
    return range(signature.axis(-1), signature.axis(-1) + 1)


def _softmax_space(signature: Signature) -> Space:
    return space_along_axes(
        signature, softmax_axes(signature), "!" if signature.node.op == "Hardmax" else "&"
    )


BYTES_OF_MOMENTS = (), (2,), (16,)
"""Arguments of `collectives_per_row` for norms with a mean: per row, forward reduces the mean and
the second moment in double precision (16 bytes), and backward reduces two sums.
"""
BYTES_OF_NORM = (1,), (1,)
"""Arguments of `collectives_per_row` for norms without a mean: per row, forward reduces a sum of
squares or absolute values, and backward reduces one sum.
"""
_MOMENTS = collectives_per_row(*BYTES_OF_MOMENTS)
_NORM = collectives_per_row(*BYTES_OF_NORM)
_SOFTMAX = collectives_per_row((1, 1), (1,))
"""Collectives of a split softmax: per row, forward reduces the maximum and the sum, and backward
one sum.
"""
extreme_collectives = collectives_per_row((1,), (2,))
"""Collectives of a split maximum or minimum: per row, forward reduces the maximum or minimum.
Backward reduces a sum, and the number of elements that equal the maximum or minimum.
"""


def _normalization_operator(
    name: str,
    notation: Callable[[Signature], Space],
    cost: float,
    statistics: Statistics = _MOMENTS,
    mixes: Callable[[Signature], bool] = lambda signature: False,
    *,
    weights: tuple[int, ...] = (),
    affine: tuple[int, ...] = (),
) -> Operator:
    """Return the definition of a normalization. `cost` is the number of FLOPs per element, and
    `mixes` the field `mixes_samples`. `affine` has the operand indices of scale and bias. `weights`
    has the operand indices of all weights of the layer; () if scale and bias are the only weights.
    """
    flops = flops_per_result_element(cost)
    return Operator(
        name,
        notation,
        "normalization",
        flops,
        2.0,
        ("0",),
        mixes_samples=mixes,
        statistics=statistics,
        layer_weights=weights or affine,
        scales_and_biases=affine,
    )


NORMALIZATION = (
    _normalization_operator(
        "BatchNormalization",
        batch_norm_space,
        4.0,
        mixes=uses_batch_statistics,
        weights=(1, 2, 3, 4),
        affine=(1, 2),
    ),
    _normalization_operator("LayerNormalization", layer_norm_space, 8.0, affine=(1, 2)),
    _normalization_operator("RMSNormalization", layer_norm_space, 5.0, _NORM, affine=(1,)),
    _normalization_operator("SimplifiedLayerNormalization", layer_norm_space, 5.0, _NORM),
    _normalization_operator("GroupNormalization", group_norm_space, 8.0, affine=(1, 2)),
    _normalization_operator(
        "InstanceNormalization", space_from_notation("n c *i=, c, c -> n c *i"), 8.0, affine=(1, 2)
    ),
    _normalization_operator(
        "MeanVarianceNormalization",
        lambda signature: space_along_axes(signature, mean_variance_axes(signature), "="),
        7.0,
        mixes=lambda signature: 0 in mean_variance_axes(signature),
    ),
    _normalization_operator(
        "LpNormalization",
        lambda signature: space_along_axes(signature, [signature.axis(-1)], "="),
        4.0,
        _NORM,
    ),
    _normalization_operator(
        "LRN", lambda signature: space_along_axes(signature, [1], "!"), 12.0, no_collectives
    ),
    *(
        Operator(
            name,
            _softmax_space,
            "normalization",
            flops_per_result_element(5.0),
            1.0,
            (">0",),
            statistics=_SOFTMAX,
            neutral=-math.inf,
            finite_at=((0, 0),),
        )
        for name in ("Softmax", "LogSoftmax")
    ),
)


def reduced_axes(signature: Signature) -> tuple[int, ...]:
    """Return the axes of a Reduce operator in ascending order. If the node states none, return all
    axes, or () if the attribute `noop_with_empty_axes` is set.
    """
    if given := stated_axes(signature, 1):
        return tuple(sorted(set(given)))
    return () if signature.node.integer("noop_with_empty_axes") else tuple(range(signature.rank))


def _reduction_space(signature: Signature, axes: tuple[int, ...], mark: str) -> Space:
    """Return the iteration space `a r+ -> a 1` of a reduction over r, or `a r+ -> a` without
    `keepdims`. `mark` is the mark of the reduced axes. Axes marked `=` or `~` cannot be split if
    the elements are integers.
    """
    own = "!" if mark in "=~" and not signature.operand(0).dtype.is_floating else mark
    result = replace_words(signature.words, axes)
    if not signature.node.integer("keepdims", 1):
        result = [word for axis, word in enumerate(result) if axis not in axes]
    return space_from_words(signature, [mark_words(signature.words, axes, own)], [result])


def cumulative_axis(signature: Signature) -> int:
    """Return the axis of a CumSum or CumProd, a constant operand, counted from the front."""
    array = signature.constant(1)
    assert array is not None, f"{signature.node.op} needs a known axis"
    return nonnegative_axis(int(array.reshape(())), signature.rank)


def _cumulative_space(signature: Signature) -> Space:
    """Return the iteration space of a CumSum or CumProd. The dimension along which elements are
    accumulated cannot be split.
    """
    return space_along_axes(signature, [cumulative_axis(signature)], "!")


def _top_k_space(signature: Signature) -> Space:
    """Return the iteration space of a TopK. The dimension along which elements are selected cannot
    be split.
    """
    axis = [signature.axis(-1)]
    return space_from_words(
        signature, [mark_words(signature.words, axis, "!")], [replace_words(signature.words, axis)]
    )


def _flops_per_operand_element(coefficient: float) -> Callable[[Signature, Space], float]:
    """Return a function for `Operator.flops`: `coefficient` FLOPs per element of operand 0."""
    return lambda signature, space: coefficient * signature.operand(0).elements


def _reduce_operator(
    name: str,
    mark: str,
    cost: float = 1.0,
    keeps: tuple[str, ...] = (),
    statistics: Statistics = no_collectives,
    *,
    neutral: float = 0.0,
    linear: str = "",
    finite_at: tuple[tuple[int, int], ...] = (),
) -> Operator:
    """Return the definition of an operator that reduces along axes. `mark` is the mark of the
    reduced axes, and `cost` the number of FLOPs per element of the operand; the other parameters
    are fields of `Operator`.
    """
    return Operator(
        name,
        lambda signature: _reduction_space(signature, reduced_axes(signature), mark),
        "reduction",
        _flops_per_operand_element(cost),
        keeps=keeps,
        static=(1,),
        statistics=statistics,
        neutral=neutral,
        linear=linear,
        finite_at=finite_at,
        reads_axis=True,
    )


def _arg_extreme_operator(name: str, neutral: float) -> Operator:
    """Return the definition of ArgMax or ArgMin. If the axis is split, devices exchange the maximum
    or minimum of each row, and then its 64-bit index. `neutral` is a field of `Operator`.
    """
    return Operator(
        name,
        lambda signature: _reduction_space(signature, (signature.axis(),), "="),
        "reduction",
        _flops_per_operand_element(1.0),
        0.0,
        differentiable=False,
        statistics=collectives_per_row((1,), (), (8,)),
        neutral=neutral,
        reads_axis=True,
    )


REDUCTION = (
    _reduce_operator("ReduceSum", "+", linear="together"),
    _reduce_operator("ReduceMean", "~", linear="together"),
    _reduce_operator("ReduceL1", "+", 2.0, keeps=("0",)),
    _reduce_operator("ReduceSumSquare", "+", 2.0, keeps=("0",)),
    _reduce_operator("ReduceL2", "=", 2.0, keeps=("0", ">0"), statistics=_NORM),
    _reduce_operator("ReduceMax", "=", 1.0, ("0", ">0"), extreme_collectives, neutral=-math.inf),
    _reduce_operator("ReduceMin", "=", 1.0, ("0", ">0"), extreme_collectives, neutral=math.inf),
    _reduce_operator("ReduceProd", "!", keeps=("0", ">0"), neutral=1.0),
    _reduce_operator("ReduceLogSum", "=", statistics=_NORM, finite_at=((0, 1),)),
    _reduce_operator("ReduceLogSumExp", "=", 6.0, ("0", ">0"), _SOFTMAX, neutral=-math.inf),
    _arg_extreme_operator("ArgMax", -math.inf),
    _arg_extreme_operator("ArgMin", math.inf),
    Operator(
        "CumSum",
        _cumulative_space,
        "reduction",
        _flops_per_operand_element(1.0),
        1.0,
        static=(1,),
        neutral=0.0,
        reads_axis=True,
    ),
    Operator(
        "CumProd",
        _cumulative_space,
        "reduction",
        _flops_per_operand_element(1.0),
        2.0,
        keeps=("0", ">0"),
        static=(1,),
        reads_axis=True,
    ),
    Operator(
        "TopK",
        _top_k_space,
        "reduction",
        _flops_per_operand_element(4.0),
        1.0,
        keeps=(">1",),
        static=(1,),
        sizes=(1,),
        reads_axis=True,
    ),
    Operator(
        "Hardmax", _softmax_space, "reduction", backward=0.0, differentiable=False, reads_axis=True
    ),
)


def loss_reduction(signature: Signature) -> str:
    """Return the reduction of a loss: `none`, `mean` or `sum`."""
    return signature.node.text("reduction", "mean")


def may_weight_labels(signature: Signature) -> bool:
    """Return True if a mean loss may divide by a number other than that of the labels, because it
    has class weights or an ignored label. The loss of a batch is then not the average of the losses
    of its parts.
    """
    return loss_reduction(signature) == "mean" and (
        signature.present(2) or signature.node.has("ignore_index")
    )


def label_axis_mark(signature: Signature) -> str:
    """Return the mark (see `autopipe.ir.space`) of the axes of a loss's labels. It depends on the
    reduction.
    """
    return {"none": "", "sum": "+", "mean": "&" if may_weight_labels(signature) else "~"}[
        loss_reduction(signature)
    ]


def class_loss_space(signature: Signature) -> Space:
    """Return the iteration space `n c *d, n *d, 1 -> n *d` of a loss over classes c: scores, labels
    and class weights. With a reduction, the first result is a scalar. The second result,
    log-probabilities, is `n c *d`.

    If c is split, each device contributes the losses of the labels in its range of classes. If the
    labels of a mean with weighted or ignored labels are split, the devices add up the weights of
    their labels, by which the mean divides.
    """
    mark = label_axis_mark(signature)
    labels = f"n{mark} *d{mark}"
    scores = f"n{mark} c& *d{mark}"
    return space_from_words(
        signature,
        [scores, labels, "1"],
        [labels if loss_reduction(signature) == "none" else "", scores],
    )


def label_axes(signature: Signature) -> tuple[str, ...]:
    """Return the names of the axes of a loss's labels."""
    return ("n", *(f"d{axis}" for axis in range(len(signature.operand(1).shape) - 1)))


def _label_weight_collectives(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[OperatorCollective, ...]:
    """Return the all-reduce that adds up the weights of the labels over devices; () if the axes of
    the labels are not split or not joint. They are joint for a mean loss that may weight or ignore
    labels.
    """
    axes = split_joint_axes(space, degrees, label_axes(signature))
    return all_reduces_of_statistics(
        axes, 1, (bytes_per_statistic(signature.operand(0).dtype),), ()
    )


def class_loss_collectives(
    signature: Signature, space: Space, degrees: Mapping[str, int], through: tuple[int, ...] = (0,)
) -> tuple[OperatorCollective, ...]:
    """Return the collectives of a loss over classes. If the classes are split, forward reduces the
    maximum score and the sum for each label, and backward one sum. If the axes of the labels are
    split, and the loss is a mean that may weight or ignore labels, a further all-reduce adds up the
    weights of the labels. `through` is a field of `OperatorCollective`.
    """
    width = bytes_per_statistic(signature.operand(0).dtype)
    labels = local_point_count(space, degrees, label_axes(signature))
    classes = all_reduces_of_statistics(
        split_joint_axes(space, degrees, "c"), labels, (width, width), (width,), through
    )
    return (*classes, *_label_weight_collectives(signature, space, degrees))


def _label_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of operand 1, the labels: from 0 to below the number of classes. Return None
    for other operands.
    """
    return (0, signature.operand(0).shape[1]) if slot == 1 else None


LOSSES = (
    Operator(
        "SoftmaxCrossEntropyLoss",
        class_loss_space,
        "normalization",
        _flops_per_operand_element(6.0),
        keeps=("probabilities",),
        mixes_samples=may_weight_labels,
        statistics=class_loss_collectives,
        loss=True,
        finite_at=((1, 0),),
        index_range=_label_range,
    ),
    Operator(
        "NegativeLogLikelihoodLoss",
        class_loss_space,
        "reduction",
        lambda signature, space: 2.0 * signature.operand(1).elements,
        keeps=("1",),
        mixes_samples=may_weight_labels,
        statistics=_label_weight_collectives,
        loss=True,
        finite_at=((1, 0),),
        index_range=_label_range,
    ),
)

OPERATOR_DEFINITIONS = (*NORMALIZATION, *REDUCTION, *LOSSES)
