"""A placement that was edited as text runs as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.api.plan_folder import placement_text
from autopipe.api.request import chosen_strategy
from autopipe.ir.placement import Placement, Split, Stage
from tests.configs.texts import parse_configuration
from tests.distributed.support.builder import mlp
from tests.distributed.support.pool import Pools
from tests.distributed.test_by_hand import check
from tests.passes.cost.graphs import cluster, problem

pytestmark = pytest.mark.distributed

EDITED = """\
  - devices: [2, 0]
    recompute: true
    nodes:
    - [4, 5]
    splits:
    - {split: {samples: 2}, nodes: ['*']}
"""


def test_a_stage_shared_by_two_devices_and_computed_again(pools: Pools, tmp_path: Path) -> None:
    graph, loss = mlp(3)
    cuts = ((0, 1, 2, 3), (4, 5), (6, 7))
    text = placement_text(
        graph, Placement(tuple(Stage(nodes, (rank,), 4) for rank, nodes in enumerate(cuts)))
    )
    head, _, rest = text.partition("  - devices: [1]\n")
    last = "  - devices: [2]\n" + rest.partition("  - devices: [2]\n")[2]
    edited = head + EDITED + last.replace("devices: [2]", "devices: [1]")
    strategy = chosen_strategy(parse_configuration(edited, "placement.yaml"))
    assert strategy is not None
    placement = strategy.run(problem(graph, cluster(3)))
    assert placement.stages[1].recompute and placement.stages[1].devices == (2, 0)
    assert all(placement.stages[1].splits_of(node) for node in (4, 5))
    check(pools, graph, loss, placement, 4, tmp_path / "program")


def test_nodes_moved_to_another_stage_keep_their_splits(pools: Pools, tmp_path: Path) -> None:
    graph, loss = mlp(3)
    columns, rows = ((Split(axis, 2),) for axis in ("n", "k"))
    stages = (
        Stage((0, 1, 2, 3), (0, 1), 4, ((0, columns), (2, rows))),
        Stage((4, 5, 6, 7), (2, 3), 4),
    )
    text = placement_text(graph, Placement(stages))
    assert "layers: [0, 1]\n" in text and "layers: [2, 2]\n" in text and "split: {k: 2}" in text
    text = text.replace("layers: [0, 1]", "layers: [0, 0]")
    text = text.replace("layers: [2, 2]", "layers: [1, 2]")
    strategy = chosen_strategy(parse_configuration(text, "placement.yaml"))
    assert strategy is not None
    placement = strategy.run(problem(graph, cluster(4)))
    assert [stage.nodes for stage in placement.stages] == [(0, 1), (2, 3, 4, 5, 6, 7)]
    assert placement.stages[1].splits == ((2, rows),)
    check(pools, graph, loss, placement, 4, tmp_path / "program")
