"""Programs whose stages run micro-batches of their own sizes, against torch and against one device."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.builder import Builder, mlp
from tests.distributed.pool import Pools
from tests.distributed.portions import random_order
from tests.distributed.running import (
    assert_equal_steps,
    batch_of,
    expected_step,
    run_step,
    stage_graph,
    write,
)

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9


def check(pools: Pools, graph: Graph, loss: str, placement: Placement, folder: Path, *options: str) -> None:
    """Two steps' worth of rounds, in an order drawn at random, against torch."""
    placement.verify(graph)
    schedule = random_order(Random(repr(placement)), stage_graph(graph, placement), 2)
    write(graph, placement, schedule, loss, folder)
    batch = batch_of(graph, 2)
    found = run_step(pools, folder, batch, *options)
    assert found.moved == communication_bytes(graph, placement, 2, schedule.devices, loss)
    assert_equal_steps(found, expected_step(graph, loss, folder, batch, 2), TOLERANCE)


def stage_of(graph: Graph, nodes: range, devices: tuple[int, ...], size: int, recompute: bool = False) -> Stage:
    """A stage that shares out its samples among its devices."""
    axes = batch_axes_of(graph)
    splits = ((node, axes.axis(node)) for node in nodes) if len(devices) > 1 else ()
    found = tuple((node, (Split(axis, len(devices)),)) for node, axis in splits if axis is not None)
    return Stage(tuple(nodes), devices, size, found, recompute)


PARTS = range(2), range(2, 4), range(4, 8)


@pytest.mark.parametrize("options", [(), ("--blocking",)])
@pytest.mark.parametrize("sizes", [(1, 2, 4), (4, 2, 1), (2, 4, 2), (4, 1, 4), (1, 1, 4), (2, 2, 2)])
def test_a_chain(pools: Pools, tmp_path: Path, sizes: tuple[int, int, int], options: tuple[str, ...]) -> None:
    graph, loss = mlp(3)
    stages = (
        stage_of(graph, nodes, (rank,), size) for rank, (nodes, size) in enumerate(zip(PARTS, sizes, strict=True))
    )
    check(pools, graph, loss, Placement(tuple(stages)), tmp_path / "program", *options)


@pytest.mark.parametrize(
    ("degrees", "sizes"),
    [((1, 2, 4), (2, 4, 8)), ((4, 2, 1), (8, 2, 1)), ((2, 4, 2), (2, 4, 8)), ((4, 1, 4), (4, 1, 8))],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_replicas_of_different_degrees(
    pools: Pools, tmp_path: Path, degrees: tuple[int, ...], sizes: tuple[int, ...], recompute: bool
) -> None:
    graph, loss = mlp(3, batch=8)
    stages = (
        stage_of(graph, nodes, tuple(range(4))[-degree:], size, recompute)
        for nodes, degree, size in zip(PARTS, degrees, sizes, strict=True)
    )
    check(pools, graph, loss, Placement(tuple(stages)), tmp_path / "program")


def two_branches() -> tuple[Graph, str]:
    """A trunk of one product, read by two branches of two nodes each, and their product's mean square."""
    builder = Builder()
    trunk = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    left = builder.node("Tanh", builder.node("MatMul", trunk, builder.parameter((4, 4))))
    right = builder.node("Sigmoid", builder.node("MatMul", trunk, builder.parameter((4, 4))))
    loss = builder.mean_square(builder.node("Mul", left, right))
    return builder.graph(loss), loss


BRANCHES = range(1), range(1, 3), range(3, 5), range(5, 8)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 2, 0), (1, 0, 0, 1)])
@pytest.mark.parametrize("sizes", [(2, 1, 4, 2), (1, 4, 2, 1), (4, 2, 1, 4)])
def test_branches(pools: Pools, tmp_path: Path, ranks: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Also where neighbours share a rank, so that what one hands over is joined or shared out there."""
    graph, loss = two_branches()
    stages = (stage_of(graph, nodes, (rank,), size) for nodes, rank, size in zip(BRANCHES, ranks, sizes, strict=True))
    check(pools, graph, loss, Placement(tuple(stages)), tmp_path / "program")


def test_a_value_that_depends_on_parameters_alone(pools: Pools, tmp_path: Path) -> None:
    """Sent to each micro-batch once, from the first that has samples in common; its gradients add up."""
    builder = Builder()
    scaled = builder.node("Tanh", builder.parameter((4, 4)))
    first = builder.node("MatMul", builder.input((4, 4)), scaled)
    loss = builder.mean_square(builder.node("MatMul", builder.node("Tanh", first), scaled))
    graph = builder.graph(loss)
    for sizes in ((1, 4), (4, 1), (2, 1)):
        stages = (
            stage_of(graph, nodes, (rank,), size)
            for rank, (nodes, size) in enumerate(zip((range(3), range(3, 6)), sizes, strict=True))
        )
        check(pools, graph, loss, Placement(tuple(stages)), tmp_path / f"program{sizes[0]}{sizes[1]}")


def test_samples_inside_a_dimension_with_others(pools: Pools, tmp_path: Path) -> None:
    """(positions, samples) and (samples, positions) merged into one dimension: shares are blocks, several or one."""
    for outer in (False, True):
        builder = Builder()
        given = builder.node("MatMul", builder.input((4, 3, 5)), builder.parameter((5, 5)))
        if outer:
            given = builder.node("Transpose", given, perm=(1, 0, 2))
        rows = builder.node("Reshape", given, builder.constant([12, 5]))
        loss = builder.mean_square(builder.node("Tanh", builder.node("MatMul", rows, builder.parameter((5, 5)))))
        graph = builder.graph(loss)
        cut = 2 + outer
        parts = range(cut), range(cut, len(graph.nodes))
        stages = (
            stage_of(graph, nodes, (rank,), size) for nodes, rank, size in zip(parts, (0, 1), (1, 4), strict=True)
        )
        check(pools, graph, loss, Placement(tuple(stages)), tmp_path / f"program{outer}")
