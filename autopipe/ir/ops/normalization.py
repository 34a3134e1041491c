"""Operators with statistics over axes that devices take together: normalisations, reductions, losses over classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopipe.ir.ops.operator import (
    NotationLine,
    Operator,
    Signature,
    Statistic,
    Statistics,
    aligned,
    axes_of,
    joint_splits,
    marked,
    names,
    no_flops,
    no_statistics,
    per_result,
    points,
    positive,
    reduced,
    replaced,
    rows,
    separates_samples,
    single,
    spell,
    unindexed,
    with_whole,
)
from autopipe.ir.space import Space

_TRAINING_MODE_STATED = 14
"""From this opset BatchNormalization states its mode; before, several results meant training."""


def trains(signature: Signature) -> bool:
    """True if a BatchNormalization normalises by the batch's own statistics."""
    if signature.opset >= _TRAINING_MODE_STATED:
        return bool(signature.node.integer("training_mode"))
    return any(value is not None for value in signature.results[1:])


def batch_norm(signature: Signature) -> NotationLine:
    """`n c *i, c, c, c, c -> n c *i, c, c`; with the batch's own statistics all devices' samples count."""
    mark = "=" if trains(signature) else ""
    first = [f"n{mark}", "c", *(f"i{axis}{mark}" for axis in range(len(signature.operand(0).shape) - 2))]
    results = [None if value is None else ["c"] for value in signature.results[1:]]
    return spell([first, *[["c"]] * 4], [first, *results])


def normalized_axes(signature: Signature) -> range:
    """Axes over which LayerNormalization and its kin normalise: from `axis` to the last."""
    rank = len(signature.operand(0).shape)
    return range(positive(signature.node.integer("axis", -1), rank), rank)


def layer_norm(signature: Signature) -> NotationLine:
    """`*b *x=, *x, *x -> *b *x, *b 1, *b 1`."""
    shape = signature.operand(0).shape
    axes = normalized_axes(signature)
    words = names(len(shape))
    scales = [None if value is None else aligned(value.shape, shape, words) for value in signature.operands[1:]]
    statistics = [*words[: axes.start], *["1"] * len(axes)]
    results = [None if value is None else statistics for value in signature.results[1:]]
    return spell([marked(words, axes, "="), *scales], [words, *results])


def group_norm(signature: Signature) -> NotationLine:
    """`n (g c=) *i=, (g c), (g c) -> n (g c) *i`; before opset 21 scale and bias are one a group."""
    groups = signature.node.integer("num_groups")
    spatial = [f"i{axis}=" for axis in range(len(signature.operand(0).shape) - 2)]
    channels = signature.operand(0).shape[1]
    scale = "(g c)" if signature.operand(1).shape == (channels,) else "g"
    line = spell([["n", "(g c=)", *spatial], [scale], [scale]], [["n", "(g c)", *spatial]])
    return NotationLine(line.text, (("g", groups), ("c", channels // groups)))


def instance_norm(signature: Signature) -> NotationLine:
    """`n c *i=, c, c -> n c *i`."""
    first = ["n", "c", *(f"i{axis}=" for axis in range(len(signature.operand(0).shape) - 2))]
    return spell([first, ["c"], ["c"]], [first])


def variance_axes(signature: Signature) -> tuple[int, ...]:
    """Axes of MeanVarianceNormalization, counted from the front."""
    rank = len(signature.operand(0).shape)
    return tuple(positive(axis, rank) for axis in signature.node.integers("axes", (0, 2, 3)))


def softmax_axes(signature: Signature) -> range:
    """Axes over which Softmax and LogSoftmax sum: one since opset 13, all from `axis` on before."""
    rank = len(signature.operand(0).shape)
    if signature.opset >= 13:
        axis = positive(signature.node.integer("axis", -1), rank)
        return range(axis, axis + 1)
    return range(positive(signature.node.integer("axis", 1), rank), rank)


def _marked_along(signature: Signature, axes: tuple[int, ...] | range, mark: str) -> NotationLine:
    words = names(len(signature.operand(0).shape))
    scales = [unindexed(value.shape) for value in signature.operands[1:] if value is not None]
    return spell([marked(words, axes, mark), *scales], [words])


def _softmax(signature: Signature) -> NotationLine:
    return _marked_along(signature, softmax_axes(signature), "&")


def _softmax_statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """The largest and the sum of a row; in backward a sum."""
    width = single(signature.operand(0).dtype)
    return reduced(joint_splits(space, degrees), rows(space, degrees), (width, width), (width,))


def _variance(signature: Signature) -> NotationLine:
    return _marked_along(signature, variance_axes(signature), "=")


def _response(signature: Signature) -> NotationLine:
    return _marked_along(signature, (1,), "!")


def _norm(signature: Signature) -> NotationLine:
    rank = len(signature.operand(0).shape)
    return _marked_along(signature, (positive(signature.node.integer("axis", -1), rank),), "=")


def _over_batch(signature: Signature) -> bool:
    return 0 in variance_axes(signature)


def moment_statistics(
    signature: Signature, space: Space, degrees: Mapping[str, int], through: tuple[int, ...] = (0,)
) -> tuple[Statistic, ...]:
    """Of each row the mean and the second moment in double precision; in backward two sums."""
    backward = 2 * single(signature.operand(0).dtype)
    return reduced(joint_splits(space, degrees), rows(space, degrees), (16,), (backward,), through)


def norm_statistics(
    signature: Signature, space: Space, degrees: Mapping[str, int], through: tuple[int, ...] = (0,)
) -> tuple[Statistic, ...]:
    """Of each row the sum of squares or sizes; in backward a sum."""
    width = single(signature.operand(0).dtype)
    return reduced(joint_splits(space, degrees), rows(space, degrees), (width,), (width,), through)


def _normalization(
    name: str,
    notation: Callable[[Signature], NotationLine],
    flops: float,
    mixes_samples: Callable[[Signature], bool] = separates_samples,
    statistics: Statistics = moment_statistics,
) -> Operator:
    return Operator(
        name,
        notation,
        "normalization",
        per_result(flops),
        2.0,
        ("0",),
        mixes_samples=mixes_samples,
        statistics=statistics,
    )


NORMALIZATION = (
    _normalization("BatchNormalization", batch_norm, 4.0, trains),
    _normalization("LayerNormalization", layer_norm, 8.0),
    _normalization("RMSNormalization", layer_norm, 5.0, statistics=norm_statistics),
    _normalization("GroupNormalization", group_norm, 8.0),
    _normalization("InstanceNormalization", instance_norm, 8.0),
    _normalization("MeanVarianceNormalization", _variance, 7.0, _over_batch),
    _normalization("LpNormalization", _norm, 4.0, statistics=norm_statistics),
    Operator("LRN", _response, "normalization", per_result(12.0), 2.0, ("0",)),
    Operator("Softmax", _softmax, "normalization", per_result(5.0), 1.0, (">0",), statistics=_softmax_statistics),
    Operator("LogSoftmax", _softmax, "normalization", per_result(5.0), 1.0, (">0",), statistics=_softmax_statistics),
)


def reduced_axes(signature: Signature) -> tuple[int, ...]:
    """Axes that a Reduce operator goes over, ascending: all where none are given, unless it is told to do nothing."""
    given = axes_of(signature, 1)
    if given:
        return tuple(sorted(set(given)))
    if signature.node.integer("noop_with_empty_axes"):
        return ()
    return tuple(range(len(signature.operand(0).shape)))


def _reduce(mark: str) -> Callable[[Signature], NotationLine]:
    """`a r+ -> a 1`, or `a r+ -> a` where dimensions are dropped; means and more of whole numbers stay whole."""

    def line(signature: Signature) -> NotationLine:
        own = "!" if mark in "=~" and not signature.operand(0).dtype.is_floating else mark
        axes = reduced_axes(signature)
        words = names(len(signature.operand(0).shape))
        if signature.node.integer("keepdims", 1):
            result = replaced(words, axes)
        else:
            result = [word for axis, word in enumerate(words) if axis not in axes]
        rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
        return spell([marked(words, axes, own), *rest], [result])

    return line


def chosen_axis(signature: Signature, default: int = 0) -> int:
    """The attribute `axis`, counted from the front."""
    return positive(signature.node.integer("axis", default), len(signature.operand(0).shape))


def _index_of_extreme(signature: Signature) -> NotationLine:
    axis = chosen_axis(signature)
    words = names(len(signature.operand(0).shape))
    kept = replaced(words, [axis])
    result = kept if signature.node.integer("keepdims", 1) else [*words[:axis], *words[axis + 1 :]]
    return spell([marked(words, [axis], "=" if signature.operand(0).dtype.is_floating else "!")], [result])


def running_axis(signature: Signature) -> int:
    """The axis of CumSum and CumProd: a static operand."""
    array = signature.constant(1)
    assert array is not None, f"{signature.node.op} needs a known axis"
    return positive(int(array.reshape(())), len(signature.operand(0).shape))


def _running(signature: Signature) -> NotationLine:
    return with_whole(signature, [running_axis(signature)])


def _top_k(signature: Signature) -> NotationLine:
    axis = chosen_axis(signature, -1)
    words = names(len(signature.operand(0).shape))
    rest = [unindexed(value.shape) for value in signature.operands[1:] if value is not None]
    result = replaced(words, [axis])
    return spell(
        [marked(words, [axis], "!"), *rest], [None if value is None else result for value in signature.results]
    )


def flattened_axes(signature: Signature) -> tuple[int, ...]:
    """Axes that Softmax, LogSoftmax and Hardmax normalise over: before opset 13, all from `axis` on."""
    rank = len(signature.operand(0).shape)
    if signature.opset < 13:
        return tuple(range(chosen_axis(signature, 1), rank))
    return (chosen_axis(signature, -1),)


def _hardmax(signature: Signature) -> NotationLine:
    return with_whole(signature, flattened_axes(signature))


def _per_operand(coefficient: float) -> Callable[[Signature, Space], float]:
    return lambda signature, space: coefficient * signature.operand(0).elements


def _told(forward: tuple[int, ...], backward: tuple[int, ...]) -> Statistics:
    """So many numbers for each row in each exchange."""

    def statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
        width = single(signature.operand(0).dtype)
        numbers = [tuple(width * count for count in counts) for counts in (forward, backward)]
        return reduced(joint_splits(space, degrees), rows(space, degrees), *numbers)

    return statistics


extreme_statistics = _told((1,), (2,))
"""Of each row the largest; in backward a sum, and how many have a share of it."""


def _index_statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """The extreme of each row, then its place, a whole number of 64 bits."""
    width = single(signature.operand(0).dtype)
    return reduced(joint_splits(space, degrees), rows(space, degrees), (width, 8), ())


def _row(
    name: str, mark: str, cost: float = 1.0, keeps: tuple[str, ...] = (), statistics: Statistics = no_statistics
) -> Operator:
    return Operator(
        name, _reduce(mark), "reduction", _per_operand(cost), 1.0, keeps, static=(1,), statistics=statistics
    )


def _index(name: str) -> Operator:
    return Operator(
        name,
        _index_of_extreme,
        "reduction",
        _per_operand(1.0),
        0.0,
        differentiable=False,
        statistics=_index_statistics,
    )


REDUCTION = (
    _row("ReduceSum", "+"),
    _row("ReduceMean", "~"),
    _row("ReduceL1", "+", 2.0, keeps=("0",)),
    _row("ReduceSumSquare", "+", 2.0, keeps=("0",)),
    _row("ReduceL2", "=", 2.0, keeps=("0", ">0"), statistics=_told((1,), (1,))),
    _row("ReduceMax", "=", keeps=("0", ">0"), statistics=extreme_statistics),
    _row("ReduceMin", "=", keeps=("0", ">0"), statistics=extreme_statistics),
    _row("ReduceProd", "!", keeps=("0", ">0")),
    _row("ReduceLogSum", "=", statistics=_told((1,), (1,))),
    _row("ReduceLogSumExp", "=", 6.0, keeps=("0", ">0"), statistics=_told((1, 1), (1,))),
    _index("ArgMax"),
    _index("ArgMin"),
    Operator("CumSum", _running, "reduction", _per_operand(1.0), 1.0, static=(1,)),
    Operator("CumProd", _running, "reduction", _per_operand(1.0), 2.0, keeps=("0", ">0"), static=(1,)),
    Operator("TopK", _top_k, "reduction", _per_operand(4.0), 1.0, keeps=(">1",), static=(1,)),
    Operator("Hardmax", _hardmax, "reduction", no_flops, 0.0, differentiable=False),
)


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
