"""Plans for devices of different kinds compute what one device does: the ranks only pretend to
differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.cluster import Cluster
from autopipe.passes.cost.memory_check import check_stage_devices
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.registry import Strategy
from tests.distributed.support.branching import BATCH, check_step, training
from tests.distributed.support.pool import Pools
from tests.distributed.support.zoo import SmallModels
from tests.passes.cost.mixed import kind, mixed_cluster


def site(fast_first: bool) -> Cluster:
    """Two devices, and two that are a fifth as fast."""
    parts = [(2, kind(0.05, 10**11, "fast")), (2, kind(0.01, 10**11, "slow"))]
    return mixed_cluster(parts if fast_first else parts[::-1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "size", "strategy", "schedule"),
    [
        ("two-branch", 4, GraphPipe(), "1f1b"),
        ("gpt", 2, PipeDream(), "tessel"),
        ("bert", 2, TePDist(), "kfkb"),
    ],
)
def test_a_plan_over_two_kinds(
    pools: Pools,
    small_models: SmallModels,
    tmp_path: Path,
    name: str,
    size: int,
    strategy: Strategy,
    schedule: str,
) -> None:
    model = small_models.of(name, size, BATCH // size)
    problem = training(model.graph, model.loss, site(fast_first=name != "gpt"))
    placement = strategy.run(problem)
    check_stage_devices(problem, placement)
    works = {"fast": 0, "slow": 0}
    for stage in placement.stages:
        works[problem.cluster.devices[stage.devices[0]].name] += len(stage.nodes)
    assert works["fast"] > works["slow"] > 0
    check_step(pools, model, problem, placement, schedule, tmp_path)
