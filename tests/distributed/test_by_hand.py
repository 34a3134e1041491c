"""Small programs whose shape is chosen by hand, each against torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from tests.distributed.builder import mlp
from tests.distributed.pool import Pools
from tests.distributed.running import assert_equal_steps, batch_of, expected_step, run_step, schedule_of, write

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9


def check(
    pools: Pools, graph: Graph, loss: str, placement: Placement, micro_batches: int, folder: Path, name: str = "1f1b"
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
    placement = Placement(tuple(Stage(nodes, (rank,), 4, (), recompute) for rank, nodes in enumerate(cuts)))
    check(pools, graph, loss, placement, 5, tmp_path / "program", name)
