"""Clusters of groups with nodes and links of their own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster, Device, DevicePool, Level, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError

FAST = Device("fast", 2**30, (("fp32", 2e12),), 2e11, 1e-6, (("matmul", 0.5),))
SLOW = replace(FAST, name="slow", memory_bytes=2**29, peak_flops=(("fp32", 1e12),))
OUTER = Link(1e-5, 1.0)


def level(size: int, bandwidth: float) -> Level:
    return Level("l", size, Link(1e-6, bandwidth))


def mixed() -> Cluster:
    """Two nodes of four fast devices and three of two slow ones."""
    groups = (
        DevicePool("a", 8, (level(4, 100.0), level(2, 10.0))),
        DevicePool("b", 6, (level(2, 50.0), level(3, 5.0))),
    )
    return Cluster("m", (FAST,) * 8 + (SLOW,) * 6, (Level("site", 2, OUTER),), groups)


def test_links_are_those_of_the_group_and_between_groups_the_one_that_joins_them() -> None:
    both = mixed()
    found = {
        pair: both.link(*pair).bandwidth_bytes_per_s
        for pair in ((0, 3), (3, 4), (8, 9), (9, 10), (8, 13))
    }
    assert found == {(0, 3): 100.0, (3, 4): 10.0, (8, 9): 50.0, (9, 10): 5.0, (8, 13): 5.0}
    assert both.link(7, 8) == both.link(13, 0) == OUTER
    assert both.link(9, 9).bandwidth_bytes_per_s == SLOW.bandwidth_bytes_per_s
    assert [both.node(device) for device in (0, 3, 4, 7, 8, 9, 10, 13)] == [0, 0, 1, 1, 2, 2, 3, 4]
    assert (both.node_count, both.devices_per_node, both.kinds) == (5, 2, (FAST, SLOW))
    assert both.part(7) == (0, both.groups[0].levels) and both.part(8) == (8, both.groups[1].levels)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to three groups of one to three levels."""
    groups = []
    devices: list[Device] = []
    for index in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        levels = tuple(level(size, draw(st.sampled_from([1.0, 2.0, 3.0]))) for size in sizes)
        count = draw(st.integers(1, min(12, math.prod(sizes))))
        groups.append(DevicePool(f"g{index}", count, levels))
        devices += [draw(st.sampled_from([FAST, SLOW]))] * count
    return Cluster(
        "c", tuple(devices), (Level("site", len(groups), Link(0.0, 1.5)),), tuple(groups)
    )


@given(clusters(), st.data())
def test_the_slowest_link_is_the_minimum_over_all_pairs(
    whole: Cluster, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, whole.size))
    part = whole.take(count)
    group = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    pairs = list(itertools.combinations(group, 2)) or [(group[0], group[0])]
    links = [part.link(first, second) for first, second in pairs]
    assert part.slowest_link(group) == min(
        links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s)
    )


@given(clusters(), st.data())
def test_the_first_devices_keep_kinds_links_and_nodes(whole: Cluster, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, whole.size))
    part = whole.take(count)
    assert part.devices == whole.devices[:count]
    assert all(part.link(a, b) == whole.link(a, b) for a in range(count) for b in range(count))
    assert [part.node(a) for a in range(count)] == [whole.node(a) for a in range(count)]
    assert sum(group.size for group in part.groups) == count


@given(clusters(), st.randoms())
def test_groups_in_another_order_are_the_same_devices_with_the_same_links(
    whole: Cluster, random: Random
) -> None:
    order = list(range(len(whole.groups)))
    random.shuffle(order)
    other, old = whole.with_pool_order(order)
    assert sorted(old) == list(range(whole.size))
    assert all(other.devices[new] == whole.devices[was] for new, was in enumerate(old))
    pairs = itertools.product(range(whole.size), repeat=2)
    assert all(other.link(a, b) == whole.link(old[a], old[b]) for a, b in pairs)


def test_groups_that_do_not_add_up_are_refused() -> None:
    both = mixed()
    with pytest.raises(ConfigurationError, match="do not add up to 13 devices"):
        replace(both, devices=both.devices[:13])
    with pytest.raises(
        ConfigurationError,
        match="group a consists of 9 devices or groups, but its levels connect only 8",
    ):
        replace(both, groups=(replace(both.groups[0], size=9), both.groups[1]))
    with pytest.raises(ConfigurationError, match="connects its groups by 2 levels"):
        replace(both, levels=both.levels * 2)
    with pytest.raises(
        ConfigurationError, match="consists of 2 devices or groups, but its levels connect only 1"
    ):
        replace(both, levels=(level(1, 1.0),))
    with pytest.raises(InfeasibleError, match="1 fewer than the requested 15"):
        both.take(15)
    with pytest.raises(ConfigurationError, match="device 14 does not exist"):
        both.link(0, 14)
