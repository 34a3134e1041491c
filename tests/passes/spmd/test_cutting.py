"""Tests of the partition of a chain into stages, against all partitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.problem import Problem
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.partition.chain_cut import partition_chain
from tests.passes.cost.graphs import perceptron, problem
from tests.passes.cost.mixed import kind, mixed_cluster

Groups = list[tuple[int, ...]]


def slowest(given: Problem, groups: Groups, stops: tuple[int, ...]) -> float:
    """Seconds of the slowest stage of a perceptron's nodes cut at `stops`, messages at both ends
    included.
    """
    bounds = (0, *stops, len(given.graph.nodes))
    crossing = [0.0]
    for place, one, other in zip(stops, groups, groups[1:], strict=False):
        link = given.cluster.link(one[-1], other[0])
        crossing.append(link.seconds(_bytes(given, place) / min(len(one), len(other))))
    crossing.append(0.0)
    found = []
    for stage, group in enumerate(groups):
        seconds = []
        for device in {given.cluster.devices[each] for each in group}:
            forward, backward = node_seconds(given.work, device, given.precision, 1 / len(group))
            seconds.append((forward + backward)[bounds[stage] : bounds[stage + 1]].sum())
        found.append(max(seconds) + crossing[stage] + crossing[stage + 1])
    return max(found)


def _bytes(given: Problem, place: int) -> int:
    return given.graph.type_of(given.graph.nodes[place - 1].outputs[0]).bytes


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([8, 64, 512]), min_size=4, max_size=6),
    st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    st.sampled_from(
        [[(0, 1), (2, 3)], [(0,), (1,), (2, 3)], [(2, 3), (1,), (0,)], [(0, 1), (2,), (3,)]]
    ),
)
def test_no_partition_has_a_faster_slowest_stage(
    widths: list[int], speed: float, groups: Groups
) -> None:
    graph = perceptron(widths)
    given = problem(graph, mixed_cluster([(2, kind(1.0)), (2, kind(speed, name="other"))]))
    stages = partition_chain(given, groups, {})
    assert [node for stage in stages for node in stage] == list(range(len(graph.nodes)))
    stops = tuple(int(stop) for stop in np.cumsum([len(stage) for stage in stages])[:-1])
    every = itertools.combinations(range(1, len(graph.nodes)), len(groups) - 1)
    best = min(slowest(given, groups, each) for each in every)
    assert slowest(given, groups, stops) == pytest.approx(best)


def test_parameters_are_placed_where_they_fit() -> None:
    """Two fast devices, one of them small: even work would exceed its memory."""
    graph = perceptron([512] * 9)
    whole = sum(each.value.bytes for each in graph.parameters)
    small = kind(1.0, memory=whole // 2, name="small")
    given = problem(graph, mixed_cluster([(1, kind(1.0)), (1, small)]))
    _, second = partition_chain(given, [(0,), (1,)], {})
    # Two of the eight layers with their gradients are a quarter of the state.
    assert sum(graph.nodes[node].op == "MatMul" for node in second) == 2
    tiny = problem(
        graph, mixed_cluster([(1, kind(1.0, memory=2)), (1, kind(1.0, memory=1, name="tiny"))])
    )
    # If no partition fits, the result ignores memory, and a later check reports the excess.
    assert [len(stage) for stage in partition_chain(tiny, [(0,), (1,)], {})] == [8, 8]
