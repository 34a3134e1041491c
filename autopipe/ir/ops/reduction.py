"""Operators that reduce or order along axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopipe.ir.ops.lines import axes_of, marked, names, positive, replaced, spell, unindexed, with_whole
from autopipe.ir.ops.row import NotationLine, Operator, Signature, Statistics, no_flops, no_statistics
from autopipe.ir.ops.statistics import Statistic, joint_splits, reduced, rows, single
from autopipe.ir.space import Space


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
