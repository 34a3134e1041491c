"""Memory of a GPU that a plan leaves to CUDA and NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.configs.cluster import build_cluster, cluster_names, cluster_preset
from autopipe.ir.cluster import Cluster, max_nccl_buffer_bytes
from autopipe.ir.problem import Problem
from tests.distributed.support.shapes import problem_of, tied_chain


def on(cluster: Cluster, **limits: int) -> Problem:
    graph, loss = tied_chain(2)
    return replace(problem_of(graph, loss, 2, 2), cluster=cluster, **limits)


@pytest.mark.parametrize("name", cluster_names())
def test_a_plan_leaves_room_for_the_context_and_nccl(name: str) -> None:
    for count in (1, 8):
        cluster = build_cluster(cluster_preset(name), count)
        device = cluster.devices[0]
        left = device.memory_bytes - on(cluster).memory_of(0)
        assert left == (
            0
            if name == "cpu-local"
            else device.context_bytes + (count > 1) * max_nccl_buffer_bytes(count)
        )
        assert left < 0.15 * device.memory_bytes


def test_a_limit_that_is_given_holds_as_it_is() -> None:
    assert (
        on(build_cluster(cluster_preset("h100-80gb"), 8), memory_limit=80 * 10**9).memory_of(0)
        == 80 * 10**9
    )


def test_buffers_grow_with_communicators_and_not_with_ranks() -> None:
    assert (
        max_nccl_buffer_bytes(1)
        == 0
        < max_nccl_buffer_bytes(2)
        == max_nccl_buffer_bytes(1024)
        < 2**30
    )
