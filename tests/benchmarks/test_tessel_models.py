"""The baselines that models are compared with: placements that hold every node, and memory counted
by layer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Problem
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.tessel.scheduler import Tessel
from benchmarks.tessel import (
    device_seconds,
    equal_groups,
    problem_on_v100,
    separate_tables,
    step_seconds,
    with_layers_recomputed,
)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """A GPT with as many numbers in its table as in its layers, on four devices."""
    sizes = {
        "layers": 8,
        "hidden": 64,
        "heads": 4,
        "vocabulary": 8192,
        "sequence": 64,
        "loss": True,
    }
    return problem_on_v100("gpt", sizes, 4, batch_size=8, micro_batch_size=1)


def test_chains_hold_every_node_and_share_tables_at_both_ends(problem: Problem) -> None:
    found = list(separate_tables(problem))
    assert {len(placement.stages[0].devices) for placement in found} == {1, 2}
    for placement in found:
        placement.verify(problem.graph)
        first = placement.stages[0]
        last = placement.stages[-1]
        assert first.devices == last.devices, "the head is the table"
        assert all(len(stage.devices) == 1 for stage in placement.stages[1:-1])


def test_equal_groups_are_equal_and_cover_all_devices(problem: Problem) -> None:
    for placement in equal_groups(problem):
        placement.verify(problem.graph)
        assert len({len(stage.devices) for stage in placement.stages}) == 1
        assert sorted(device for stage in placement.stages for device in stage.devices) == [
            0,
            1,
            2,
            3,
        ]
        assert min(device_seconds(problem, placement)) > 0


def test_layers_are_recomputed_and_tables_are_not(problem: Problem) -> None:
    placement = with_layers_recomputed(TesselShapes("m").run(problem))
    assert [stage.recompute for stage in placement.stages] == [
        len(each.devices) == 1 for each in placement.stages
    ]
    assert sum(stage.recompute for stage in placement.stages) == 4


def test_the_search_is_no_slower_than_1f1b_and_memory_is_asked(problem: Problem) -> None:
    placement = with_layers_recomputed(TesselShapes("m").run(problem))
    ours, theirs = (
        step_seconds(problem, placement, each) for each in (Tessel(), OneForwardOneBackward())
    )
    assert ours <= theirs
    small = replace(problem.cluster.devices[0], memory_bytes=2**20)
    cluster = replace(problem.cluster, devices=(small,) * 4)
    with pytest.raises(InfeasibleError, match="out of memory"):
        step_seconds(replace(problem, cluster=cluster), placement, OneForwardOneBackward())
