"""Small programs whose shape is chosen by hand, each against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import DType, Graph
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.program import Collective
from autopipe.passes.placement.grid import Degrees, place_grid
from tests.distributed.support.builder import Builder, evaluate, mlp
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    drawn_parameters,
    expected_step,
    micro_batches_of,
    run_forward,
    run_step,
    schedule_of,
    write,
)
from tests.passes.cost.graphs import cluster, problem

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9


def check(
    pools: Pools,
    graph: Graph,
    loss: str,
    placement: Placement,
    micro_batches: int,
    folder: Path,
    name: str = "1f1b",
) -> None:
    placement.verify(graph)
    write(graph, placement, schedule_of(graph, placement, micro_batches, name), loss, folder)
    batch = batch_of(graph, micro_batches)
    found = run_step(pools, folder, batch)
    assert_equal_steps(found, expected_step(graph, loss, folder, batch, micro_batches), TOLERANCE)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_chain_of_stages(pools: Pools, tmp_path: Path, name: str, recompute: bool) -> None:
    graph, loss = mlp(3)
    cuts = ((0, 1), (2, 3), (4, 5, 6, 7))
    placement = Placement(
        tuple(Stage(nodes, (rank,), 4, (), recompute) for rank, nodes in enumerate(cuts))
    )
    check(pools, graph, loss, placement, 5, tmp_path / "program", name)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_a_grid_in_two_directions(pools: Pools, tmp_path: Path, name: str) -> None:
    graph, loss = mlp(4)
    placement = place_grid(
        problem(graph, cluster(4)), Degrees(2, 1, 2), 1, style="loop", opposite=True
    )
    assert placement.pipelines == 2 and any(stage.splits for stage in placement.stages)
    check(pools, graph, loss, placement, 4, tmp_path / "program", name)


def batch_splits(
    graph: Graph, nodes: range, degree: int
) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    """Every node of `nodes` split by its samples."""
    axes = batch_axes_of(graph)
    found = ((node, axes.axis(node)) for node in nodes)
    return tuple((node, (Split(axis, degree),)) for node, axis in found if axis is not None)


@pytest.mark.parametrize("degrees", [(1, 2, 4), (4, 2, 1), (2, 4, 2), (4, 1, 4), (2, 2, 2)])
def test_replicas_of_different_degrees(
    pools: Pools, tmp_path: Path, degrees: tuple[int, int, int]
) -> None:
    graph, loss = mlp(3, batch=8)
    parts = (range(2), range(2, 4), range(4, 8))
    stages = tuple(
        Stage(tuple(nodes), tuple(range(4))[-degree:], 8, batch_splits(graph, nodes, degree))
        for nodes, degree in zip(parts, degrees, strict=True)
    )
    check(pools, graph, loss, Placement(stages), 4, tmp_path / "program")


def test_three_groups_of_two(pools: Pools, tmp_path: Path) -> None:
    graph, loss = mlp(3)
    parts = (range(2), range(2, 4), range(4, 8))
    groups = ((4, 1), (0, 5), (3, 2))
    stages = tuple(
        Stage(tuple(nodes), group, 4, batch_splits(graph, nodes, 2))
        for nodes, group in zip(parts, groups, strict=True)
    )
    check(pools, graph, loss, Placement(stages), 6, tmp_path / "program")


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_device_with_the_first_and_the_last_stage(
    pools: Pools, tmp_path: Path, name: str
) -> None:
    graph, loss = mlp(3)
    cuts = ((0, 1), (2, 3), (4, 5, 6, 7))
    placement = Placement(
        tuple(Stage(nodes, (rank,), 4) for nodes, rank in zip(cuts, (0, 1, 0), strict=True))
    )
    check(pools, graph, loss, placement, 4, tmp_path / "program", name)


def test_devices_without_any_stage(pools: Pools, tmp_path: Path) -> None:
    graph, loss = mlp(1)
    placement = Placement((Stage((0,), (1,), 4), Stage((1, 2, 3), (3,), 4)))
    check(pools, graph, loss, placement, 3, tmp_path / "program")


def test_branches_side_by_side(pools: Pools, tmp_path: Path) -> None:
    builder = Builder()
    trunk = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    left = builder.node("Tanh", builder.node("MatMul", trunk, builder.parameter((4, 4))))
    right = builder.node("Sigmoid", builder.node("MatMul", trunk, builder.parameter((4, 4))))
    loss = builder.mean_square(builder.node("Mul", left, right))
    graph = builder.graph(loss)
    placement = Placement(
        (
            Stage((0,), (0,), 4),
            Stage((1, 2), (1,), 4),
            Stage((3, 4), (2,), 4),
            Stage((5, 6, 7), (3,), 4),
        )
    )
    check(pools, graph, loss, placement, 4, tmp_path / "program")


def test_a_tied_table_whole_in_one_stage_and_cut_in_another(pools: Pools, tmp_path: Path) -> None:
    """An embedding that is also the output projection: one rank holds all of it, two others would
    hold halves.
    """
    builder = Builder()
    table = builder.parameter((6, 4))
    ids = builder.input((4, 3), DType.INT64)
    hidden = builder.node("Tanh", builder.node("Gather", table, ids))
    logits = builder.node("MatMul", hidden, builder.node("Transpose", table, perm=(1, 0)))
    loss = builder.mean_square(logits)
    graph = builder.graph(loss)
    columns = (
        space_of(graph, graph.nodes[2]).axes[0].name,
        space_of(graph, graph.nodes[3]).axes[-1].name,
    )
    splits = ((2, (Split(columns[0], 2),)), (3, (Split(columns[1], 2),)))
    placement = Placement((Stage((0, 1), (0,), 4), Stage((2, 3, 4, 5), (1, 2), 4, splits)))
    check(pools, graph, loss, placement, 3, tmp_path / "program")


def test_a_value_that_many_stages_need(pools: Pools, tmp_path: Path) -> None:
    """Two consumers on one rank, one on another, one on a group; the gradient is the sum of all."""
    builder = Builder()
    trunk = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    first = builder.node("Tanh", trunk)
    second = builder.node("Add", builder.node("Neg", trunk), first)
    third = builder.node("Mul", builder.node("Sigmoid", trunk), second)
    loss = builder.mean_square(builder.node("Mul", third, trunk))
    graph = builder.graph(loss)
    tail = range(6, 9)
    placement = Placement(
        (
            Stage((0,), (0,), 4),
            Stage((1,), (1,), 4),
            Stage((2, 3), (1,), 4),
            Stage((4, 5), (2,), 4),
            Stage(tuple(tail), (3, 0), 4, batch_splits(graph, tail, 2)),
        )
    )
    check(pools, graph, loss, placement, 4, tmp_path / "program")


def test_whole_numbers_that_cross_stages(pools: Pools, tmp_path: Path) -> None:
    builder = Builder()
    scores = builder.node("MatMul", builder.input((4, 3, 4)), builder.parameter((4, 4)))
    choice = builder.node("ArgMax", scores, axis=2, keepdims=0)
    found = builder.node("Gather", builder.parameter((6, 4)), choice)
    loss = builder.mean_square(builder.node("Add", found, scores))
    graph = builder.graph(loss)
    tail = range(2, 6)
    placement = Placement(
        (Stage((0, 1), (0,), 4), Stage(tuple(tail), (1, 2), 4, batch_splits(graph, tail, 2)))
    )
    check(pools, graph, loss, placement, 3, tmp_path / "program")


def test_a_loss_that_other_nodes_use_too(pools: Pools, tmp_path: Path) -> None:
    """A mean over samples that two devices share is brought together before anything computes with
    it.
    """
    builder = Builder()
    value = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    mean = builder.mean_square(value)
    loss = builder.node("Add", builder.node("Tanh", mean), mean)
    graph = builder.graph(loss)
    nodes = range(len(graph.nodes))
    placement = Placement((Stage(tuple(nodes), (0, 1), 4, batch_splits(graph, nodes, 2)),))
    check(pools, graph, loss, placement, 2, tmp_path / "program")


def forward(
    pools: Pools, graph: Graph, placement: Placement, micro_batches: int, folder: Path
) -> None:
    """Every output of an inference step equals torch's: samples joined, what has none once a
    micro-batch.
    """
    placement.verify(graph)
    write(graph, placement, schedule_of(graph, placement, micro_batches, train=False), None, folder)
    batch = batch_of(graph, micro_batches)
    found = run_forward(pools, folder, batch)
    parameters = drawn_parameters(graph, folder)
    parts = [
        evaluate(graph, parameters | inputs)
        for inputs in micro_batches_of(graph, batch, micro_batches)
    ]
    axes = {entry.value.name: entry.batch_axis for entry in read_manifest(folder).outputs}
    assert list(found) == list(graph.outputs)
    for name in graph.outputs:
        values = [part[name] for part in parts]
        axis = axes[name]
        expected = torch.stack(values) if axis is None else torch.cat(values, axis)
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-9, atol=1e-12)


def test_outputs_by_samples_and_without(pools: Pools, tmp_path: Path) -> None:
    builder = Builder()
    value = builder.node("MatMul", builder.input((4, 2, 4)), builder.parameter((4, 4)))
    turned = builder.node("Transpose", value, perm=(1, 0, 2))
    merged = builder.node("Reshape", value, builder.constant((8, 4)))
    means = builder.node("ReduceMean", value, builder.constant([0, 1]), keepdims=0)
    total = builder.node("ReduceSum", value, builder.constant([0, 1, 2]), keepdims=0)
    later = builder.node("Tanh", total)
    graph = builder.graph(value, turned, merged, means, total, later)
    nodes = range(len(graph.nodes))
    placement = Placement((Stage(tuple(nodes), (0, 1), 4, batch_splits(graph, nodes, 2)),))
    forward(pools, graph, placement, 3, tmp_path / "program")
    axes = [entry.batch_axis for entry in read_manifest(tmp_path / "program").outputs]
    assert axes == [0, 1, 0, None, None, None]


def test_outputs_of_as_many_samples_as_there_are(pools: Pools, tmp_path: Path) -> None:
    """17 samples fill a batch of 12 and 5 of another; steps beyond are not run."""
    builder = Builder()
    value = builder.node("MatMul", builder.input((4, 2, 4)), builder.parameter((4, 4)))
    turned = builder.node("Transpose", value, perm=(1, 0, 2))
    merged = builder.node("Reshape", value, builder.constant((8, 4)))
    total = builder.node("ReduceSum", value, builder.constant([0, 1, 2]), keepdims=0)
    graph = builder.graph(value, turned, merged, total)
    nodes = range(len(graph.nodes))
    placement = Placement((Stage(tuple(nodes), (0, 1), 4, batch_splits(graph, nodes, 2)),))
    folder = tmp_path / "program"
    write(graph, placement, schedule_of(graph, placement, 3, train=False), None, folder)
    batch = {
        name: np.concatenate([array, array])[:17] for name, array in batch_of(graph, 3).items()
    }
    found = list(run_forward(pools, folder, batch, "--steps", 5).values())
    assert [each.shape for each in found] == [(17, 2, 4), (2, 17, 4), (34, 4), (5,)]
    assert np.array_equal(found[0], np.moveaxis(found[1], 1, 0)) and np.array_equal(
        found[0].reshape(34, 4), found[2]
    )
    (given,) = batch.values()
    (weight,) = (each.numpy() for each in drawn_parameters(graph, folder).values())
    np.testing.assert_allclose(found[0], given @ weight, rtol=1e-9)


def test_micro_batches_of_one_sample(pools: Pools, tmp_path: Path) -> None:
    builder = Builder()
    value = builder.node("MatMul", builder.input((1, 4)), builder.parameter((4, 4)))
    graph = builder.graph(value)
    forward(pools, graph, Placement((Stage((0,), (0,), 1),)), 3, tmp_path / "program")
    assert [entry.batch_axis for entry in read_manifest(tmp_path / "program").outputs] == [0]


def test_outputs_that_nothing_computes(pools: Pools, tmp_path: Path) -> None:
    """An input, a parameter and a constant may be outputs, whoever reads them otherwise."""
    builder = Builder()
    given = builder.input((4, 4))
    weight = builder.parameter((4, 4))
    known = builder.constant([1.0, 2.0, 3.0, 4.0], DType.FLOAT64)
    value = builder.node("Add", builder.node("MatMul", given, weight), known)
    graph = builder.graph(given, weight, known, value)
    splits = ((1, (Split("x0", 2),)),)
    placement = Placement((Stage((0,), (0,), 4), Stage((1,), (1, 2), 4, splits)))
    forward(pools, graph, placement, 2, tmp_path / "program")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_narrow_arithmetic(pools: Pools, tmp_path: Path, precision: str, recompute: bool) -> None:
    """Products run in narrow types, as do messages: close to one device in fp32."""
    builder = Builder(dtype=DType.FLOAT32)
    value = builder.input((4, 4))
    for _ in range(3):
        value = builder.node("Tanh", builder.node("MatMul", value, builder.parameter((4, 4))))
    loss = builder.mean_square(value)
    graph = builder.graph(loss)
    parts = (range(1), range(1, 4), range(4, len(graph.nodes)))
    groups = ((0,), (1, 2), (3,))
    placement = Placement(
        tuple(
            Stage(
                tuple(nodes),
                group,
                4,
                batch_splits(graph, nodes, 2) if len(group) > 1 else (),
                recompute,
            )
            for nodes, group in zip(parts, groups, strict=True)
        )
    )
    folder = tmp_path / "program"
    program = write(graph, placement, schedule_of(graph, placement, 4), loss, folder, precision)
    sent = {block.dtype for rank in program.ranks for stage in rank.stages for block in stage.sends}
    assert (
        sent == {DType.BFLOAT16 if precision == "bf16" else DType.FLOAT16}
        and program.roundings == 2
    )
    batch = batch_of(graph, 4)
    found = run_step(pools, folder, batch)
    expected = expected_step(graph, loss, folder, batch, 4)
    assert_equal_steps(found, expected, 3e-2)
    with pytest.raises(AssertionError):
        assert_equal_steps(found, expected, 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_exchanges_of_every_type(pools: Pools, tmp_path: Path, precision: str) -> None:
    """Sums in the narrow types of autocast, and gathered whole numbers and truth values."""
    builder = Builder(dtype=DType.FLOAT32)
    ids = builder.input((4, 4), DType.INT64)
    doubled = builder.node("Add", ids, ids)
    mask = builder.node("Greater", doubled, builder.constant(4))
    product = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    chosen = builder.node("Where", mask, product, builder.node("Cast", doubled, to=1))
    again = builder.node("MatMul", builder.node("Tanh", chosen), builder.parameter((4, 4)))
    loss = builder.mean_square(again)
    graph = builder.graph(loss)
    splits = (
        (0, (Split("x0", 2),)),
        (1, (Split("x0", 2),)),
        (2, (Split("k", 2),)),
        (6, (Split("k", 2),)),
    )
    placement = Placement((Stage(tuple(range(len(graph.nodes))), (0, 1), 4, splits),))
    folder = tmp_path / "program"
    program = write(graph, placement, schedule_of(graph, placement, 2), loss, folder, precision)
    kinds = {
        (operation.relayout.kind, operation.source.dtype)
        for operation in program.stages[0].operations
        if isinstance(operation, Collective)
    }
    assert {
        ("all_gather", DType.INT64),
        ("all_gather", DType.BOOL),
        ("all_reduce", DType.FLOAT32),
    } <= kinds
    batch = batch_of(graph, 2)
    expected = expected_step(graph, loss, folder, batch, 2)
    assert_equal_steps(
        run_step(pools, folder, batch), expected, 1e-5 if precision == "fp32" else 3e-2
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_first_gradients_that_autograd_lets_share_memory(
    pools: Pools, tmp_path: Path, stages: int
) -> None:
    """Parts of one gradient become two parameters': adding a micro-batch to either must not change
    the other.
    """
    builder = Builder()
    value = builder.node("MatMul", builder.input((1, 3, 4)), builder.parameter((4, 4)))
    first = builder.node("Concat", builder.parameter((1, 1, 4)), value, axis=1)
    second = builder.node("Concat", builder.parameter((1, 1, 4)), value, axis=1)
    together = builder.node("Add", first, second)
    flat = builder.node("Reshape", together, builder.constant([16]))
    moved = builder.node(
        "Add", flat, builder.node("Reshape", builder.parameter((4, 4)), builder.constant([16]))
    )
    loss = builder.mean_square(builder.node("Tanh", moved))
    graph = builder.graph(loss)
    nodes = tuple(range(len(graph.nodes)))
    cut = (
        len(nodes)
        if stages == 1
        else graph.nodes.index(next(each for each in graph.nodes if each.op == "Tanh"))
    )
    parts = [part for part in (nodes[:cut], nodes[cut:]) if part]
    placement = Placement(tuple(Stage(part, (rank,), 1) for rank, part in enumerate(parts)))
    check(pools, graph, loss, placement, 4, tmp_path / "program")
