"""Split backwards on four ranks: gradients of one device, whatever shares parameters, recomputes or
stays whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Stage, stage_edges
from autopipe.ir.schedule import StageGraph
from tests.distributed.support.builder import Builder
from tests.distributed.support.halves import halved
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    expected_step,
    run_step,
    schedule_of,
    write,
)
from tests.distributed.test_by_hand import batch_splits

pytestmark = pytest.mark.distributed


def tied_pieces() -> tuple[Graph, str]:
    """A table that is looked up and, transposed, projects back; pieces of a product, one used twice
    and one not at all; a scale and a bias that no product has.
    """
    builder = Builder()
    table = builder.parameter((6, 4))
    hidden = builder.node("Gather", table, builder.input((4, 3), DType.INT64))
    wide = builder.node(
        "Add", builder.node("MatMul", hidden, builder.parameter((4, 12))), builder.parameter((12,))
    )
    first = builder.node("Split", wide, outputs=3, axis=2, num_outputs=3)
    third = builder.values[-1].name
    mixed = builder.node("Mul", builder.node("Tanh", first), builder.node("Add", first, third))
    mixed = builder.node(
        "LayerNormalization", mixed, builder.parameter((4,)), builder.parameter((4,))
    )
    mixed = builder.node("Tanh", builder.node("MatMul", mixed, builder.parameter((4, 4))))
    logits = builder.node("MatMul", mixed, builder.node("Transpose", table, perm=(1, 0)))
    loss = builder.mean_square(logits)
    return builder.graph(loss), loss


CUTS = (range(1), range(1, 6), range(6, 10), range(10, 14))


def placed(graph: Graph, groups: tuple[tuple[int, ...], ...], recompute: bool) -> Placement:
    assert CUTS[-1].stop == len(graph.nodes)
    stages = tuple(
        Stage(
            tuple(nodes),
            group,
            4,
            batch_splits(graph, nodes, len(group)) if len(group) > 1 else (),
            recompute,
        )
        for nodes, group in zip(CUTS, groups, strict=True)
    )
    return Placement(stages)


GROUPS = {
    "chain": ((0,), (1,), (2,), (3,)),
    "groups": ((0,), (1, 2), (1, 2), (3, 0)),
    "folded": ((0,), (1,), (1,), (0,)),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("groups", list(GROUPS))
def test_gradients_of_one_device(
    pools: Pools, tmp_path: Path, groups: str, recompute: bool
) -> None:
    graph, loss = tied_pieces()
    placement = placed(graph, GROUPS[groups], recompute)
    placement.verify(graph)
    schedule = halved(schedule_of(graph, placement, 5), 2, frozenset({(1, 0), (1, 4), (3, 2)}))
    stages = tuple(stage.devices for stage in placement.stages)
    schedule.verify(StageGraph(placement.devices, stages, stage_edges(graph, placement)), True)
    folder = tmp_path / "program"
    write(graph, placement, schedule, loss, folder)
    batch = batch_of(graph, 5)
    found = run_step(pools, folder, batch)
    assert_equal_steps(found, expected_step(graph, loss, folder, batch, 5), 1e-9)
    waiting = run_step(pools, folder, batch, "--blocking")
    assert waiting.loss == found.loss
    for index, gradient in found.gradients.items():
        assert np.array_equal(waiting.gradients[index], gradient)
