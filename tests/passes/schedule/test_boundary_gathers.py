"""Values are sent in slices and gathered if, and only if, this is faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import build, configure
from autopipe.ir.cluster import Link
from autopipe.passes.lower.lower import lower
from autopipe.passes.pipeline import PlanResult, Request, make_plan
from autopipe.passes.placement.grid import Grid
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward


def planned(folder: Path, slower: float, precision: str) -> PlanResult:
    """Plan two stages on one node of eight devices each. The link between the nodes is slower than
    the links within by the factor `slower`.
    """
    path = folder / "gpt.onnx"
    build(configure("gpt", {"loss": "true", "heads": "8", "hidden": "64"})).save(path)
    cluster = build_cluster(cluster_preset("a100-80gb"), 16, None, None)
    inside, between = cluster.levels
    link = Link(inside.link.latency_s, inside.link.bandwidth_bytes_per_s / slower)
    cluster = replace(cluster, levels=(inside, replace(between, link=link)))
    grid = Grid(pipeline=2, tensor=8)
    scheduler = OneForwardOneBackward()
    return make_plan(
        Request(path, cluster, grid, scheduler, batch_size=16, micro_batches=4, precision=precision)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_of_eight_devices_sends_an_eighth_over_a_slow_link(
    tmp_path: Path, precision: str
) -> None:
    found = planned(tmp_path, 1e5, precision)
    problem = found.problem
    placement = found.plan.placement
    plain = replace(
        placement, stages=tuple(replace(stage, gathers=()) for stage in placement.stages)
    )
    sent = []
    for each in (placement, plain):
        program = lower(problem.graph, each, found.plan.schedule, problem.loss, precision=precision)
        blocks = (block for rank in program.ranks for stage in rank.stages for block in stage.sends)
        sizes: Counter[int] = Counter()
        for block in blocks:
            sizes[block.source_rank] += block.bytes
        sent.append(sizes)
    assert placement.stages[1].gathers and set(sent[0]) == set(range(8))
    assert {rank: 8 * size for rank, size in sent[0].items()} == sent[1]


def test_nothing_is_gathered_over_equally_fast_links(tmp_path: Path) -> None:
    assert not any(stage.gathers for stage in planned(tmp_path, 1.0, "fp32").plan.placement.stages)
