"""Links of a hierarchy of devices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster, Device, Level, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError

DEVICE = Device("d", 2**30, (("fp32", 1e12), ("fp16", 4e12)), 1e11, 1e-6, (("matmul", 0.5),))


def cluster(sizes: list[int], bandwidths: list[float], count: int | None = None) -> Cluster:
    levels = tuple(
        Level(f"l{i}", n, Link(i * 1e-6, b))
        for i, (n, b) in enumerate(zip(sizes, bandwidths, strict=True))
    )
    total = 1
    for size in sizes:
        total *= size
    return Cluster("c", (DEVICE,) * (count or total), levels)


def test_a_link_is_that_of_the_smallest_group_that_holds_both() -> None:
    two = cluster([4, 2], [100.0, 10.0])
    assert two.size == 8 and two.devices_per_node == 4 and two.node_count == 2
    assert two.link(0, 3) == two.levels[0].link
    assert two.link(3, 4) == two.link(7, 0) == two.levels[1].link
    assert two.link(5, 5) == Link(0.0, 1e11)
    assert [two.node(device) for device in (0, 3, 4)] == [0, 0, 1]
    assert two.slowest_link([0, 1, 2]) == two.levels[0].link
    assert two.slowest_link([2]) == Link(0.0, 1e11)
    assert Link(1.0, 4.0).seconds(8) == 3.0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_the_slowest_link_is_the_minimum_over_all_pairs(
    sizes: list[int], data: st.DataObject
) -> None:
    bandwidths = [data.draw(st.sampled_from([1.0, 2.0, 3.0])) for _ in sizes]
    whole = cluster(sizes, bandwidths)
    count = data.draw(st.integers(1, whole.size))
    part = whole.take(count)
    group = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    pairs = list(itertools.combinations(group, 2)) or [(group[0], group[0])]
    links = [part.link(first, second) for first, second in pairs]
    assert part.slowest_link(group) == min(
        links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s)
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_taking_devices_changes_no_link_between_them(sizes: list[int], data: st.DataObject) -> None:
    whole = cluster(sizes, [float(100 - i) for i in range(len(sizes))])
    count = data.draw(st.integers(1, whole.size))
    part = whole.take(count)
    assert part.size == count
    assert all(part.link(a, b) == whole.link(a, b) for a in range(count) for b in range(count))
    assert part.take(count) == part


def test_bad_requests_are_refused() -> None:
    two = cluster([4, 2], [100.0, 10.0])
    with pytest.raises(
        InfeasibleError, match="consists of 8 devices, 1 fewer than the requested 9"
    ):
        two.take(9)
    with pytest.raises(ConfigurationError, match="number of devices to plan for is 0"):
        two.take(0)
    with pytest.raises(ConfigurationError, match="device 8 does not exist"):
        two.link(0, 8)
    with pytest.raises(ConfigurationError, match="group of 0 devices"):
        two.slowest_link([])
    with pytest.raises(ConfigurationError, match="connect only 8"):
        cluster([4, 2], [100.0, 10.0], 9)
    with pytest.raises(ConfigurationError, match="requires a device and a level"):
        Cluster("c", (), ())


def test_a_device_states_peaks_and_fractions() -> None:
    assert DEVICE.peak("fp16") == 4e12
    assert DEVICE.peak("bf16") == DEVICE.peak("tf32") == 1e12
    assert DEVICE.efficiency_of("matmul") == 0.5
    with pytest.raises(ConfigurationError, match="not declare the peak FLOP/s for fp64"):
        DEVICE.peak("fp64")
    with pytest.raises(
        ConfigurationError, match="not declare the efficiency for operators of class convolution"
    ):
        DEVICE.efficiency_of("convolution")
