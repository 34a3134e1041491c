"""Branches on two ranks each, split inside as the search finds it, and what graphpipe makes of
them, on ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.ir.cluster import Level, Link
from autopipe.ir.placement import Placement, Stage
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.placement.graphpipe.strategy import GraphPipe, split_stages_by_pase
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from tests.distributed.support.pool import Pools
from tests.distributed.support.portions import forwards_first
from tests.distributed.support.running import stage_graph
from tests.distributed.support.trained import MICRO_BATCHES, check, problem_of
from tests.distributed.support.zoo import SmallModels

pytestmark = pytest.mark.distributed

BRANCHES = {
    "two-branch": (range(22), range(22, 49)),
    "mmt": (range(29), range(29, 63)),
    "candle-uno": (range(8), range(8, 21)),
}


@pytest.mark.parametrize("sizes", [(4, 4), (2, 4)])
@pytest.mark.parametrize("name", BRANCHES)
def test_two_branches_on_two_ranks_each(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, sizes: tuple[int, int]
) -> None:
    model = small_models.of(name, 4)
    samples = sample_axes(model.graph)
    parts = zip(BRANCHES[name], ((0, 1), (2, 3)), sizes, strict=True)
    stages = (
        Stage(tuple(nodes), ranks, size, samples.splits(nodes, 2)) for nodes, ranks, size in parts
    )
    before = Placement(tuple(stages))
    problem = problem_of(model, 4)
    slow = replace(problem.cluster, levels=(Level("node", 4, Link(0.0, 1e6)),))
    after = split_stages_by_pase(replace(problem, cluster=slow), before)
    axes = samples.axes
    assert any(
        split.axis != axes[node]
        for stage in after.stages
        for node, own in stage.splits
        for split in own
    )
    schedule = forwards_first(stage_graph(model.graph, after), MICRO_BATCHES)
    check(pools, model, after, tmp_path, schedule)


@pytest.mark.parametrize("name", ["two-branch", "mmt"])
def test_graphpipe_with_micro_batches_of_stages_own(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str
) -> None:
    model = small_models.of(name, 4)
    problem = problem_of(model, 4)
    links = replace(problem.cluster, levels=(Level("node", 4, Link(0.0, 1e9)),))
    problem = replace(problem, cluster=links, micro_batch_sizes=(2, 4))
    placement = GraphPipe(intra="pase", per_stage_micro_batch=True).run(problem)
    assert {stage.micro_batch_size for stage in placement.stages} == {2, 4}
    schedule = KForwardsKBackwards().run(problem, placement)
    check(pools, model, placement, tmp_path, schedule)
