"""Layers that ranks compute together, each with a part: loss, gradients, and the bytes they tell
one another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from autopipe.backends.torch.codegen import normalization
from autopipe.ir.graph import DType, Graph
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.passes.frontend.fusion import cross_entropy
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.builder import Builder, evaluate
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
from tests.distributed.support.strategies import random_stage

pytestmark = pytest.mark.distributed

BATCH = 4
CHANNELS = 4
CLASSES = 8
MICRO_BATCHES = 2


def images() -> tuple[Graph, str]:
    """Convolution, normalisations of four kinds, a product with a bias, and a loss that leaves
    labels out.
    """
    builder = Builder()

    def vector(size: int, trainable: bool = True) -> str:
        return builder.parameter((size,), trainable)

    x = builder.input((BATCH, 2, 4, 4))
    x = builder.node(
        "Conv",
        x,
        builder.parameter((CHANNELS, 2, 1, 1)),
        vector(CHANNELS),
        pads=(0,) * 4,
        strides=(1, 1),
        dilations=(1, 1),
    )
    vectors = [vector(CHANNELS), vector(CHANNELS), vector(CHANNELS, False), vector(CHANNELS, False)]
    x = builder.node("BatchNormalization", x, *vectors, outputs=3, training_mode=1)
    x = builder.node("Tanh", x)
    x = builder.node("InstanceNormalization", x, vector(CHANNELS), vector(CHANNELS))
    x = builder.node("GroupNormalization", x, vector(CHANNELS), vector(CHANNELS), num_groups=2)
    x = builder.node("Reshape", x, builder.constant((BATCH, CHANNELS * 16)))
    x = builder.node("LayerNormalization", x, vector(CHANNELS * 16), vector(CHANNELS * 16), axis=-1)
    x = builder.node("Gemm", x, builder.parameter((CHANNELS * 16, CLASSES)), vector(CLASSES))
    x = builder.node("LpNormalization", x, axis=-1, p=2)
    labels = builder.input((BATCH,), DType.INT64)
    weights = builder.constant(np.linspace(0.5, 2, CLASSES), DType.FLOAT64)
    loss = builder.node("SoftmaxCrossEntropyLoss", x, labels, weights, ignore_index=1)
    return builder.graph(loss), loss


def sequences() -> tuple[Graph, str]:
    """Two recurrent layers, attention under a causal mask, and reductions that do not add up."""
    builder = Builder()
    steps = 4
    units = 4
    width = 4
    x = builder.input((steps, BATCH, width), batch_axis=1)
    weights = [builder.parameter((1, 4 * units, extent)) for extent in (width, units)]
    x = builder.node(
        "LSTM", x, *weights, builder.parameter((1, 8 * units)), outputs=3, hidden_size=units
    )
    x = builder.node("Reshape", x, builder.constant((steps, BATCH, units)))
    x = builder.node("RMSNormalization", x, builder.parameter((units,)), axis=-1)
    weights = [builder.parameter((1, 3 * units, extent)) for extent in (units, units)]
    x = builder.node("GRU", x, *weights, outputs=2, hidden_size=units)
    x = builder.node("Reshape", x, builder.constant((steps, BATCH, units)))
    x = builder.node("Transpose", x, perm=(1, 0, 2))
    x = builder.node("Attention", x, x, x, q_num_heads=2, kv_num_heads=2, is_causal=1)
    ends = [
        builder.node("ReduceL2", x, builder.constant([2]), keepdims=0),
        builder.node("ReduceMin", x, builder.constant([1]), keepdims=0),
        builder.node("ReduceLogSumExp", x, builder.constant([1, 2]), keepdims=0),
    ]
    losses = list(map(builder.mean_square, ends))
    loss = builder.node("Add", builder.node("Add", losses[0], losses[1]), losses[2])
    return builder.graph(loss), loss


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("made", [images, sequences])
def test_any_splits(
    pools: Pools, tmp_path: Path, made: Callable[[], tuple[Graph, str]], seed: int
) -> None:
    graph, loss = made()
    random = Random(seed)
    stage = random_stage(random, graph, range(len(graph.nodes)), random.sample(range(4), 4), BATCH)
    check(pools, graph, loss, Placement((stage,)), tmp_path / "program")


def test_every_joint_axis_alone(pools: Pools, tmp_path: Path) -> None:
    """All ranks share the one joint axis of each node: its last."""
    for name, (graph, loss) in {"images": images(), "sequences": sequences()}.items():
        splits = []
        for index, node in enumerate(graph.nodes):
            joint = [
                axis.name
                for axis in space_of(graph, node).axes
                if axis.kind.is_joint and axis.size % 4 == 0
            ]
            splits += (
                [(index, (Split(joint[-1], 4),))]
                if joint and node.op != "GroupNormalization"
                else []
            )
        assert len(splits) > 5
        stage = Stage(tuple(range(len(graph.nodes))), (2, 0, 3, 1), BATCH, tuple(splits))
        check(pools, graph, loss, Placement((stage,)), tmp_path / name)


@pytest.mark.parametrize(
    "splits", [{"c": 4}, {"n": 4}, {"d0": 4}, {"n": 2, "c": 2}, {"c": 2, "d0": 2}], ids=" ".join
)
def test_tied_embeddings_and_a_loss_that_makes_its_scores(
    splits: dict[str, int], pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the scores of all classes and their loss on one device."""
    builder = Builder()
    tokens, labels = (builder.input((BATCH, 4), DType.INT64) for _ in range(2))
    table = builder.parameter((CLASSES, CHANNELS))
    hidden = builder.node("Tanh", builder.node("Gather", table, tokens))
    scores = builder.node("MatMul", hidden, builder.node("Transpose", table, perm=(1, 0)))
    rows = [
        builder.node("Reshape", each, builder.constant(shape))
        for each, shape in ((scores, (16, CLASSES)), (labels, (16,)))
    ]
    loss = builder.node("SoftmaxCrossEntropyLoss", *rows, ignore_index=1)
    plain = builder.graph(loss)
    monkeypatch.setattr(normalization, "MAX_CLASSES_PER_BLOCK", 3)
    graph = cross_entropy.fuse_linear_losses(plain, (loss,))
    assert [node.op for node in graph.nodes] == [
        "Gather",
        "Tanh",
        "Transpose",
        "LinearCrossEntropy",
    ]
    own = tuple(Split(*each) for each in splits.items())
    parts = [*((index, (Split("d0", 4),)) for index in (0, 2) if splits == {"c": 4}), (3, own)]
    check(
        pools,
        graph,
        loss,
        Placement((Stage((0, 1, 2, 3), (2, 0, 3, 1), BATCH, tuple(parts)),)),
        tmp_path,
        plain,
    )


def check(
    pools: Pools,
    graph: Graph,
    loss: str,
    placement: Placement,
    folder: Path,
    meant: Graph | None = None,
) -> None:
    """Equal loss and gradients as on one device by `meant`, or by the graph itself, and as many
    bytes as predicted.
    """
    placement.verify(graph)
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    write(graph, placement, schedule, loss, folder)
    batch = batch_of(graph, MICRO_BATCHES, below=CLASSES)
    found = run_step(pools, folder, batch)
    assert_equal_steps(
        found, expected_step(meant or graph, loss, folder, batch, MICRO_BATCHES), 1e-9
    )
    assert found.moved == communication_bytes(
        graph, placement, MICRO_BATCHES, placement.devices, loss
    )


def test_running_statistics_are_those_of_the_whole_batch(pools: Pools, tmp_path: Path) -> None:
    builder = Builder()
    x = builder.input((BATCH, CHANNELS, 4))
    x = builder.node(
        "BatchNormalization",
        x,
        *(builder.parameter((CHANNELS,)) for _ in range(4)),
        outputs=3,
        training_mode=1,
    )
    graph = builder.graph(*(value.name for value in builder.values))
    stage = Stage((0,), (0, 1, 2, 3), BATCH, ((0, (Split("n", 2), Split("i0", 2))),))
    placement = Placement((stage,))
    folder = tmp_path / "program"
    write(graph, placement, schedule_of(graph, placement, 1, train=False), None, folder)
    batch = batch_of(graph, 1)
    found = run_forward(pools, folder, batch)
    (inputs,) = micro_batches_of(graph, batch, 1)
    expected = evaluate(graph, drawn_parameters(graph, folder) | inputs)
    for name in graph.outputs:  # What has no samples is given once a micro-batch.
        torch.testing.assert_close(
            torch.from_numpy(found[name]).reshape(expected[name].shape), expected[name]
        )
