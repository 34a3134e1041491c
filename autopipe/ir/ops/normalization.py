"""Normalisations: statistics over some axes, which devices take together, then element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopipe.ir.ops.lines import aligned, marked, names, positive, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature, Statistics, per_result, separates_samples
from autopipe.ir.ops.statistics import Statistic, joint_splits, reduced, rows, single
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
