"""How devices are shared among stages: every factorisation, groups within nodes where they can
be.
"""

from __future__ import annotations

import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.passes.placement.tepdist.strategy import meshes


@pytest.mark.parametrize(
    ("devices", "stages"), [(1, [1]), (6, [1, 2, 3, 6]), (8, [1, 2, 4, 8]), (7, [1, 7])]
)
def test_every_factorisation_of_a_node_once(devices: int, stages: list[int]) -> None:
    found = list(meshes(build_cluster(cluster_preset("tepdist-m8"), devices)))
    assert [mesh.stages for mesh in found] == stages
    for mesh in found:
        assert sorted(device for group in mesh.groups for device in group) == list(range(devices))
        assert {len(group) for group in mesh.groups} == {devices // mesh.stages}


def test_two_levels_in_both_orders_where_a_stage_has_several_nodes() -> None:
    cluster = build_cluster(cluster_preset("tepdist-m8"), 32)
    by_name = {mesh.name: mesh for mesh in meshes(cluster)}
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
    (mesh,) = meshes(cluster, stages)
    assert all(len({cluster.node(device) for device in group}) == 1 for group in mesh.groups)


def test_as_many_stages_as_asked_for_or_none() -> None:
    cluster = build_cluster(cluster_preset("tepdist-m8"), 8)
    assert [mesh.stages for mesh in meshes(cluster, 2)] == [2]
    assert not list(meshes(cluster, 3))
