"""Tests of meshes, bounds and placements on devices of several types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory_check import check_stage_devices
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.chain_cut import partition_chain
from autopipe.passes.placement.tepdist.intra_stage import IntraStageSearch
from autopipe.passes.placement.tepdist.levels import O2
from autopipe.passes.placement.tepdist.strategy import StepBounds, TePDist, enumerate_meshes
from autopipe.passes.schedule.limits import quick_step
from autopipe.passes.sharding.search import SplitProblem
from tests.passes.cost.graphs import perceptron, problem
from tests.passes.cost.mixed import OUTER, kind, mixed_cluster

FAST = kind(0.04, name="fast")
SLOW = kind(0.01, name="slow")


def given(layers: int = 12, micro_batches: int = 8) -> Problem:
    return problem(
        perceptron([128] * (layers + 1)), mixed_cluster([(4, FAST), (2, SLOW)]), micro_batches
    )


def test_groups_are_equal_within_each_device_type() -> None:
    found = {mesh.name: mesh.groups for mesh in enumerate_meshes(given().cluster)}
    assert next(iter(found)) == "1 stage of 4 devices and 1 stage of 2 devices"
    assert len(found) == 6
    assert found["2 stages of 2 devices and 2 stages of 1 device"] == ((0, 1), (2, 3), (4,), (5,))
    nodes = mixed_cluster([(4, FAST), (4, SLOW)], per_node=2)
    crossed = {mesh.name: mesh.groups for mesh in enumerate_meshes(nodes)}[
        "1 stage of 2 x 2 devices and 1 stage of 2 x 2 devices"
    ]
    assert crossed in (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 2, 1, 3), (4, 6, 5, 7)))
    free = replace(given().cluster, allow_mixed_stages=True)
    assert [mesh.stages for mesh in enumerate_meshes(free)] == [1, 2, 3, 6]


@pytest.mark.parametrize("micro_batches", [2, 32])
def test_no_step_is_shorter_than_its_bound(micro_batches: int) -> None:
    both = given(micro_batches=micro_batches)
    bounds = StepBounds(both)
    for mesh in enumerate_meshes(both.cluster):
        stages = partition_chain(both, mesh.groups, {})
        placement = Placement(
            tuple(Stage(nodes, group, 8) for nodes, group in zip(stages, mesh.groups, strict=True))
        )
        alone = Placement(
            tuple(replace(stage, devices=stage.devices[:1]) for stage in placement.stages)
        )
        step = quick_step(both, alone, stage_costs(both, alone)).end
        least = bounds.minimum_step_s(mesh, micro_batches)
        assert 0 < least <= bounds.minimum_step_of_partition_s(mesh, micro_batches, stages) <= step
        if max(map(len, mesh.groups)) == 1 and micro_batches == 32:
            # Devices differ by a constant factor, and warm-up and cool-down are short, so the
            # bound is tight.
            assert least > 0.5 * step


def test_work_follows_the_devices() -> None:
    both = given(layers=54, micro_batches=16)
    answer = TePDist().run(both)
    check_stage_devices(both, answer)
    costs = stage_costs(both, answer)
    names = {both.cluster.devices[stage.devices[0]].name for stage in answer.stages}
    assert names == {"fast", "slow"}
    seconds = [cost.forward_s + cost.backward_s for cost in costs]
    assert max(seconds) < 1.6 * min(seconds)
    works = dict.fromkeys(names, 0)
    for stage in answer.stages:
        works[both.cluster.devices[stage.devices[0]].name] += len(stage.nodes)
    assert works["fast"] > 5 * works["slow"]


def test_equal_layers_on_other_devices_are_searched_again() -> None:
    both = given(layers=8)
    nodes = [(2, 3), (4, 5), (6, 7)]
    stages = (
        Stage((0, 1), (0, 1), 8),
        *(Stage(each, (0, 1), 8) for each in nodes),
        Stage(tuple(range(8, 16)), (5,), 8),
    )
    inside = SplitProblem(both, Placement(stages), {})
    search = IntraStageSearch(both, O2())
    groups = [(0, 1), (2, 3), (4, 5)]
    keys = [search.stage_key(nodes[i], groups[i], inside.options[i + 1]) for i in range(3)]
    keys.append(search.stage_key(nodes[2], (0, 1), inside.options[3]))
    assert keys[0] == keys[1] == keys[3] != keys[2]


def test_possible_numbers_of_stages() -> None:
    both = given()
    with pytest.raises(
        ConfigurationError, match="stages is 1, but 6 devices cannot be divided into 1 equal groups"
    ):
        TePDist(stages=1).requires(both)
    assert len(TePDist(stages=3).run(both).stages) == 3
    with pytest.raises(InfeasibleError):
        TePDist().run(replace(both, memory_limit=1000))


def test_equal_device_types_give_the_plan_of_one_type() -> None:
    same = kind(0.02)
    parted = problem(perceptron([128] * 9), mixed_cluster([(2, same), (2, same)]), 8)
    levels = (parted.cluster.groups[0].levels[0], replace(parted.cluster.levels[0], link=OUTER))
    whole = replace(parted, cluster=Cluster("c", parted.cluster.devices, levels))
    assert TePDist(stages=2).run(parted) == TePDist(stages=2).run(whole)
