"""Tests of the meshes: all factorisations, groups inside nodes if possible, and both orders of two
levels.
"""

from __future__ import annotations

import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.passes.placement.tepdist.strategy import enumerate_meshes


@pytest.mark.parametrize(
    ("devices", "stages"), [(1, [1]), (6, [1, 2, 3, 6]), (8, [1, 2, 4, 8]), (7, [1, 7])]
)
def test_each_factorisation_of_a_node_occurs_once(devices: int, stages: list[int]) -> None:
    found = list(enumerate_meshes(build_cluster(cluster_preset("tepdist-m8"), devices)))
    assert [mesh.stages for mesh in found] == stages
    for mesh in found:
        assert sorted(device for group in mesh.groups for device in group) == list(range(devices))
        assert {len(group) for group in mesh.groups} == {devices // mesh.stages}


def test_a_stage_of_several_nodes_has_meshes_in_both_orders() -> None:
    cluster = build_cluster(cluster_preset("tepdist-m8"), 32)
    by_name = {mesh.name: mesh for mesh in enumerate_meshes(cluster)}
    assert list(by_name) == [
        "1 stage of 4 x 8 devices", "1 stage of 8 x 4 devices", "2 stages of 2 x 8 devices",
        "2 stages of 8 x 2 devices", "4 stages of 8 devices", "8 stages of 4 devices", "16 stages of 2 devices",
        "32 stages of 1 device",
    ]  # fmt: skip
    outside = by_name["2 stages of 2 x 8 devices"].groups[1]
    inside = by_name["2 stages of 8 x 2 devices"].groups[1]
    assert outside == tuple(range(16, 32))
    assert inside[:4] == (16, 24, 17, 25), "what is split first stays in a node"


@pytest.mark.parametrize("stages", [4, 8, 16])
def test_no_group_of_at_most_a_node_crosses_nodes(stages: int) -> None:
    cluster = build_cluster(cluster_preset("summit"), 16)
    (mesh,) = enumerate_meshes(cluster, stages)
    assert all(len({cluster.node(device) for device in group}) == 1 for group in mesh.groups)


def test_the_requested_number_of_stages_or_no_mesh() -> None:
    cluster = build_cluster(cluster_preset("tepdist-m8"), 8)
    assert [mesh.stages for mesh in enumerate_meshes(cluster, 2)] == [2]
    assert not list(enumerate_meshes(cluster, 3))
