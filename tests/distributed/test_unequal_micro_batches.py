"""Programs whose stages run micro-batches of their own sizes, against torch and against one
device.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.builder import Builder, evaluate, mlp
from tests.distributed.support.pool import Pools
from tests.distributed.support.portions import forwards_first, random_order
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    drawn_parameters,
    expected_step,
    micro_batches_of,
    run_forward,
    run_step,
    stage_graph,
    write,
)
from tests.distributed.support.trained import MICRO_BATCHES
from tests.distributed.support.trained import check as check_model
from tests.distributed.support.zoo import SmallModels

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9
Parts = tuple[tuple[range, tuple[int, ...], int], ...]
"""Nodes, devices and samples a micro-batch of each stage."""


def check(
    pools: Pools, graph: Graph, loss: str, placement: Placement, folder: Path, *options: str
) -> None:
    """Two steps' worth of rounds, in an order drawn at random, against torch."""
    placement.verify(graph)
    schedule = random_order(Random(repr(placement)), stage_graph(graph, placement), 2)
    write(graph, placement, schedule, loss, folder)
    batch = batch_of(graph, 2)
    found = run_step(pools, folder, batch, *options)
    assert found.moved == communication_bytes(graph, placement, 2, schedule.devices, loss)
    assert_equal_steps(found, expected_step(graph, loss, folder, batch, 2), TOLERANCE)


def stage_of(
    graph: Graph, nodes: range, devices: tuple[int, ...], size: int, recompute: bool = False
) -> Stage:
    """A stage that shares out its samples among its devices."""
    axes = batch_axes_of(graph)
    splits = ((node, axes.axis(node)) for node in nodes) if len(devices) > 1 else ()
    found = tuple((node, (Split(axis, len(devices)),)) for node, axis in splits if axis is not None)
    return Stage(tuple(nodes), devices, size, found, recompute)


PARTS = range(2), range(2, 4), range(4, 8)


@pytest.mark.parametrize("options", [(), ("--blocking",)])
@pytest.mark.parametrize(
    "sizes", [(1, 2, 4), (4, 2, 1), (2, 4, 2), (4, 1, 4), (1, 1, 4), (2, 2, 2)]
)
def test_a_chain(
    pools: Pools, tmp_path: Path, sizes: tuple[int, int, int], options: tuple[str, ...]
) -> None:
    graph, loss = mlp(3)
    stages = (
        stage_of(graph, nodes, (rank,), size)
        for rank, (nodes, size) in enumerate(zip(PARTS, sizes, strict=True))
    )
    check(pools, graph, loss, Placement(tuple(stages)), tmp_path / "program", *options)


@pytest.mark.parametrize(
    ("degrees", "sizes"),
    [
        ((1, 2, 4), (2, 4, 8)),
        ((4, 2, 1), (8, 2, 1)),
        ((2, 4, 2), (2, 4, 8)),
        ((4, 1, 4), (4, 1, 8)),
    ],
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
    """A trunk of one product, read by two branches of two nodes each, and their product's mean
    square.
    """
    builder = Builder()
    trunk = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    left = builder.node("Tanh", builder.node("MatMul", trunk, builder.parameter((4, 4))))
    right = builder.node("Sigmoid", builder.node("MatMul", trunk, builder.parameter((4, 4))))
    loss = builder.mean_square(builder.node("Mul", left, right))
    return builder.graph(loss), loss


BRANCHES = range(1), range(1, 3), range(3, 5), range(5, 8)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 2, 0), (1, 0, 0, 1)])
@pytest.mark.parametrize("sizes", [(2, 1, 4, 2), (1, 4, 2, 1), (4, 2, 1, 4)])
def test_branches(
    pools: Pools, tmp_path: Path, ranks: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """Also where neighbours share a rank, so that what one hands over is joined or shared out
    there.
    """
    graph, loss = two_branches()
    stages = (
        stage_of(graph, nodes, (rank,), size)
        for nodes, rank, size in zip(BRANCHES, ranks, sizes, strict=True)
    )
    check(pools, graph, loss, Placement(tuple(stages)), tmp_path / "program")


def test_a_value_that_depends_on_parameters_alone(pools: Pools, tmp_path: Path) -> None:
    """Sent to each micro-batch once, from the first that has samples in common; its gradients add
    up.
    """
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
        check(
            pools, graph, loss, Placement(tuple(stages)), tmp_path / f"program{sizes[0]}{sizes[1]}"
        )


def test_a_constant_with_a_row_for_each_sample(pools: Pools, tmp_path: Path) -> None:
    """Each stage has as many of its rows as it has samples, beside a table that all have whole."""
    builder = Builder()
    rows = builder.constant(np.tile(np.linspace(-1, 1, 4), (4, 1)), DType.FLOAT64)
    table = builder.constant(np.linspace(0, 1, 4), DType.FLOAT64)
    value = builder.input((4, 4))
    for _ in range(3):
        value = builder.node("MatMul", builder.node("Add", value, rows), builder.parameter((4, 4)))
        value = builder.node("Tanh", builder.node("Mul", value, table))
    loss = builder.mean_square(value)
    graph = builder.graph(loss)
    parts = zip(
        (range(4), range(4, 8), range(8, len(graph.nodes))), (0, 1, 0), (1, 4, 2), strict=True
    )
    placement = Placement(
        tuple(stage_of(graph, nodes, (rank,), size) for nodes, rank, size in parts)
    )
    check(pools, graph, loss, placement, tmp_path / "program")
    with np.load(tmp_path / "program" / "constants.npz") as stored:
        assert sorted(array.shape for array in stored.values() if array.ndim == 2) == [
            (1, 4),
            (2, 4),
            (4, 4),
        ]
        assert sum(array.shape == (4,) for array in stored.values()) == 1


def test_samples_inside_a_dimension_with_others(pools: Pools, tmp_path: Path) -> None:
    """(positions, samples) and (samples, positions) merged into one dimension: shares are blocks,
    several or one.
    """
    for outer in (False, True):
        builder = Builder()
        given = builder.node("MatMul", builder.input((4, 3, 5)), builder.parameter((5, 5)))
        if outer:
            given = builder.node("Transpose", given, perm=(1, 0, 2))
        rows = builder.node("Reshape", given, builder.constant([12, 5]))
        loss = builder.mean_square(
            builder.node("Tanh", builder.node("MatMul", rows, builder.parameter((5, 5))))
        )
        graph = builder.graph(loss)
        cut = 2 + outer
        parts = range(cut), range(cut, len(graph.nodes))
        stages = (
            stage_of(graph, nodes, (rank,), size)
            for nodes, rank, size in zip(parts, (0, 1), (1, 4), strict=True)
        )
        check(pools, graph, loss, Placement(tuple(stages)), tmp_path / f"program{outer}")


@pytest.mark.parametrize(("sizes", "degree"), [((1, 2, 4), 2), ((4, 2, 1), 2), ((2, 4, 1), 1)])
def test_outputs_of_inference(
    pools: Pools, tmp_path: Path, sizes: tuple[int, int, int], degree: int
) -> None:
    """Samples are in order again, whichever stage gives an output, in micro-batches of whichever
    size.
    """
    builder = Builder()
    hidden = builder.node(
        "Tanh", builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    )
    middle = builder.node("Tanh", builder.node("MatMul", hidden, builder.parameter((4, 4))))
    last = builder.node(
        "Transpose", builder.node("MatMul", middle, builder.parameter((4, 3))), perm=(1, 0)
    )
    graph = builder.graph(hidden, middle, last)
    parts = (range(2), range(2, 4), range(4, 6))
    groups = ((0,), (1, 2)[:degree], (3,))
    stages = (stage_of(graph, *each) for each in zip(parts, groups, sizes, strict=True))
    placement = Placement(tuple(stages))
    schedule = random_order(Random(repr(sizes)), stage_graph(graph, placement), 3, train=False)
    write(graph, placement, schedule, None, tmp_path / "program")
    batch = batch_of(graph, 3)
    found = run_forward(pools, tmp_path / "program", batch)
    parameters = drawn_parameters(graph, tmp_path / "program")
    micro_batches = [
        evaluate(graph, parameters | inputs) for inputs in micro_batches_of(graph, batch, 3)
    ]
    for name, axis in ((hidden, 0), (middle, 0), (last, 1)):
        expected = np.concatenate([values[name].numpy() for values in micro_batches], axis)
        np.testing.assert_allclose(found[name], expected, rtol=TOLERANCE)


ZOO = {
    "two-branch": ((range(22), (0,), 1), (range(22, 44), (1,), 4), (range(44, 49), (2, 3), 2)),
    "mmt": ((range(29), (0, 1), 2), (range(29, 58), (2,), 4), (range(58, 63), (3,), 1)),
    "dlrm": (
        (range(4), (0,), 4),
        (range(4, 8), (1,), 1),
        (range(8, 12), (2,), 2),
        (range(12, 22), (3, 0), 4),
    ),
    "candle-uno": (
        (range(4), (0,), 1),
        (range(4, 12), (1,), 2),
        (range(12, 17), (2,), 1),
        (range(17, 21), (3,), 4),
    ),
}
ON_EIGHT = {
    "two-branch": (
        (range(12), (0, 1), 2), (range(12, 22), (2,), 1), (range(22, 35), (3,), 4), (range(35, 44), (4, 5), 4),
        (range(44, 49), (6, 7), 2),
    ),
    "mmt": (
        (range(29), (0, 1, 2, 3), 4), (range(29, 45), (4, 5), 2), (range(45, 58), (6,), 1), (range(58, 63), (7,), 4),
    ),
}  # fmt: skip


def placed(graph: Graph, parts: Parts, recompute: bool = False) -> Placement:
    return Placement(tuple(stage_of(graph, *part, recompute) for part in parts))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("recompute", [False, True])
def test_models_of_the_zoo(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, recompute: bool
) -> None:
    model = small_models.of(name, 4)
    placement = placed(model.graph, ZOO[name], recompute)
    schedule = random_order(Random(name), stage_graph(model.graph, placement), MICRO_BATCHES)
    check_model(pools, model, placement, tmp_path, schedule)


@pytest.mark.parametrize("name", ON_EIGHT)
def test_models_of_the_zoo_on_eight_ranks(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    model = small_models.of(name, 4)
    placement = placed(model.graph, ON_EIGHT[name])
    check_model(
        pools,
        model,
        placement,
        tmp_path,
        forwards_first(stage_graph(model.graph, placement), MICRO_BATCHES),
    )
