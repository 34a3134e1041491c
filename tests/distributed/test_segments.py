"""Stages that run again segment by segment: gradients of one device, whatever the segments
share.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Stage
from tests.distributed.support.builder import Builder
from tests.distributed.support.pool import Pools
from tests.distributed.test_by_hand import batch_splits, check

pytestmark = pytest.mark.distributed


def tied() -> tuple[Graph, str]:
    """A table that is looked up first and projects back at the end, a mask that every layer reads,
    and values that skip layers.
    """
    builder = Builder()
    table = builder.parameter((32, 8))
    indices = builder.input((4, 16), DType.INT64)
    mask = builder.node("Tanh", builder.input((4, 16, 8)))
    hidden = first = builder.node("Gather", table, indices)
    for _ in range(4):
        wide = builder.node("MatMul", hidden, builder.parameter((8, 32)))
        for _ in range(3):
            wide = builder.node("Tanh", wide)
        narrow = builder.node("MatMul", wide, builder.parameter((32, 8)))
        hidden = builder.node("Add", hidden, builder.node("Mul", narrow, mask))
    hidden = builder.node("Add", hidden, first)
    logits = builder.node("MatMul", hidden, builder.node("Transpose", table, perm=(1, 0)))
    loss = builder.mean_square(logits)
    return builder.graph(loss), loss


def tied_loops() -> tuple[Graph, str]:
    """Two loops far apart that read one weight, with two products of wide values between them."""
    builder = Builder()
    weight = builder.parameter((8, 8))
    body = Builder(rename=lambda name: f"body.{name}")
    body.input((), DType.INT64, batch_axis=None)
    state = body.input((4, 8))
    shared = body.input((8, 8), batch_axis=None)
    cell = body.graph(body.node("Tanh", body.node("MatMul", state, shared)))
    hidden = builder.loop(cell, 3, [builder.input((4, 8))], [weight])
    for _ in range(4):
        wide = builder.node("MatMul", hidden, builder.parameter((8, 32)))
        for _ in range(3):
            wide = builder.node("Tanh", wide)
        hidden = builder.node("MatMul", wide, builder.parameter((32, 8)))
    loss = builder.mean_square(builder.loop(cell, 2, [hidden], [weight]))
    return builder.graph(loss), loss


@pytest.mark.parametrize("model", [tied, tied_loops], ids=["table", "loops"])
@pytest.mark.parametrize("devices", [(0,), (0, 1)], ids=["alone", "replicas"])
def test_what_several_segments_read(
    pools: Pools, tmp_path: Path, devices: tuple[int, ...], model: Callable[[], tuple[Graph, str]]
) -> None:
    """Replicas start to sum the gradient of a parameter that two segments read when both segments
    have added to it. A segment also reads a parameter if only the body of a loop in it does.
    """
    graph, loss = model()
    splits = batch_splits(graph, range(len(graph.nodes)), 2) if len(devices) > 1 else ()
    placement = Placement((Stage(tuple(range(len(graph.nodes))), devices, 4, splits, True),))
    check(pools, graph, loss, placement, 3, tmp_path / "program")
    text = (tmp_path / "program" / "stage_00.json").read_text(encoding="utf-8")
    segments = json.loads(text)["segments"]
    assert sum("w0" in each for each in segments) == 2
    assert len(segments) > 2
