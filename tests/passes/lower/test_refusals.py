"""What cannot be executed is refused in one line that says what and where."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import CodegenError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.analysis.micro_batches import check_micro_batch_sizes
from autopipe.passes.lower.lower import lower
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.running import one_device


def two_devices(graph: Graph, *splits: tuple[int, tuple[Split, ...]]) -> tuple[Placement, Schedule]:
    order = (Task(0, Phase.FORWARD, 0), Task(0, Phase.BACKWARD, 0))
    stage = Stage(tuple(range(len(graph.nodes))), (0, 1), graph.inputs[0].shape[0], splits)
    return Placement((stage,)), Schedule(1, (order, order))


@pytest.mark.parametrize(
    ("node", "splits", "message"),
    [
        (0, (Split("zz", 2),), "MatMul lacks the axis 'zz'"),
        (0, (Split("b", 3),), "cannot be split by b:3 over 2 devices"),
        (0, (Split("b", 2), Split("n", 2)), "cannot be split by b:2 n:2 over 2 devices"),
    ],
)
def test_splits_of_other_axes_or_degrees(
    node: int, splits: tuple[Split, ...], message: str
) -> None:
    graph, loss = mlp(1)
    with pytest.raises(CodegenError, match=message):
        lower(graph, *two_devices(graph, (node, splits)), loss)


def test_uneven_splits() -> None:
    builder = Builder()
    value = builder.node("Tanh", builder.input((3, 5)))
    loss = builder.mean_square(
        builder.node("Softmax", builder.node("Add", value, builder.parameter((5,))), axis=-1)
    )
    graph = builder.graph(loss)
    axes = [axis.name for axis in _space(graph, 0).axes]
    with pytest.raises(
        CodegenError,
        match=f"axis '{axes[0]}' of operator Tanh has size 3, which 2 devices cannot",
    ):
        lower(
            graph, *two_devices(graph, (0, (Split(axes[0], 2),)), (1, (Split(axes[0], 2),))), loss
        )


def test_whole_axes() -> None:
    builder = Builder()
    window = {"pads": (1, 1), "strides": (1,), "dilations": (1,)}
    loss = builder.mean_square(
        builder.node("Conv", builder.input((4, 3, 8)), builder.parameter((4, 3, 3)), **window)
    )
    graph = builder.graph(loss)
    axis = next(axis.name for axis in _space(graph, 0).axes if axis.kind is AxisKind.UNSPLITTABLE)
    with pytest.raises(CodegenError, match=f"Conv cannot be split along axis '{axis}'"):
        lower(graph, *two_devices(graph, (0, (Split(axis, 2),))), loss)


def test_micro_batches_that_do_not_divide() -> None:
    graph, loss = mlp(1)
    placement = Placement((Stage((0,), (0,), 4), Stage((1, 2, 3), (0,), 3)))
    _, schedule = one_device(graph, 1, True, 4)
    with pytest.raises(
        CodegenError,
        match="stage 1 has micro-batches of 3 samples, which do not divide the 4 samples",
    ):
        lower(graph, placement, schedule, loss)


def test_a_mean_of_micro_batches_that_others_would_read_in_other_portions() -> None:
    builder = Builder()
    first, second = (
        builder.mean_square(
            builder.node("MatMul", builder.input((4, 5)), builder.parameter((5, 5)))
        )
        for _ in range(2)
    )
    loss = builder.node("Add", first, second)
    graph = builder.graph(loss)
    placement = Placement((Stage((0, 1, 2), (0,), 2), Stage((3, 4, 5, 6), (0,), 4)))
    _, schedule = one_device(graph, 1, True, 4)
    with pytest.raises(
        InfeasibleError,
        match=r"'v2' .* 2 samples to a stage with micro-batches of 4, but",
    ):
        lower(graph, placement, schedule, loss)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
def test_a_sum_of_all_samples_is_not_taken_in_portions(op: str) -> None:
    """A mean is: the means of equal shares average to it."""
    builder = Builder()
    value = builder.node("MatMul", builder.input((4, 5)), builder.parameter((5, 5)))
    loss = builder.node(op, value, builder.constant([0, 1]), keepdims=0)
    graph = builder.graph(loss)
    placement = Placement((Stage((0,), (0,), 4), Stage((1,), (0,), 2)))
    if op == "ReduceMean":
        check_micro_batch_sizes(graph, placement)
        return
    with pytest.raises(
        InfeasibleError,
        match="stage 1 would compute different results on micro-batches of 2 samples",
    ):
        check_micro_batch_sizes(graph, placement)
    check_micro_batch_sizes(graph, Placement((Stage((0,), (0,), 1), Stage((1,), (0,), 4))))


def test_more_devices_than_the_schedule_has() -> None:
    graph, loss = mlp(1)
    _, schedule = one_device(graph, 1, True, 4)
    placement = Placement((Stage((0, 1, 2, 3), (1,), 4),))
    with pytest.raises(
        CodegenError, match="the placement uses 2 devices, but the schedule is for 1"
    ):
        lower(graph, placement, schedule, loss)


def test_a_loss_of_several_numbers() -> None:
    graph, _ = mlp(1)
    with pytest.raises(CodegenError, match=r"the loss 'v1' has shape \[4, 4\]"):
        lower(graph, *one_device(graph, 1, True, 4), "v1")


def test_a_loss_that_nothing_computes() -> None:
    builder = Builder()
    given = builder.input((), batch_axis=None)
    graph = builder.graph(builder.node("Tanh", given))
    with pytest.raises(CodegenError, match="the loss 'in0' is not computed by the model"):
        lower(graph, *one_device(graph, 1, True, 4), given)


def _space(graph: Graph, index: int) -> Space:
    return space_of(graph, graph.nodes[index])
