from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.cost import communication
from autopipe.passes.cost.communication import all_gather, all_reduce, reduce_scatter
from tests.passes.cost.graphs import cluster

FAST = 1e10
SLOW = 1e9
COLLECTIVES = (all_reduce, all_gather, reduce_scatter)


def test_large_all_reduce_is_a_ring_and_small_one_a_tree() -> None:
    toy = cluster(8)
    size = 1e9
    large = all_reduce(toy, range(8)).seconds(size)
    assert large == pytest.approx(2 * 7 / 8 * size / FAST, rel=1e-3)
    assert all_reduce(toy, range(8)).seconds(8) == pytest.approx(3 * 1e-6, rel=1e-2)
    assert all_reduce(toy, range(6)).seconds(6) == pytest.approx(2 * 3 * 1e-6, rel=1e-2)


def test_a_group_over_nodes_reduces_inside_them_first() -> None:
    toy = cluster(16, 4)
    size = 1e9
    within = 2 * 3 / 4 * size / FAST
    between = 2 * 3 / 4 * size / SLOW
    flat = 2 * 15 / 16 * size / SLOW
    found = all_reduce(toy, range(16)).seconds(size)
    assert found == pytest.approx(min(within + between, flat), rel=1e-3)
    # One member a node: no inner level.
    assert all_reduce(toy, (0, 4, 8, 12)).seconds(size) == pytest.approx(between, rel=1e-3)


def test_a_lopsided_group_goes_by_its_slowest_link() -> None:
    toy = cluster(8, 4)
    assert all_reduce(toy, (0, 1, 2, 4)).seconds(1e9) == pytest.approx(
        2 * 3 / 4 * 1e9 / SLOW, rel=1e-3
    )


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_device_and_no_bytes_are_free(collective: type[communication.CollectiveCost]) -> None:
    toy = cluster(8, 4)
    assert collective(toy, (3,)).seconds(1e9) == 0
    assert collective(toy, (3, 4)).seconds(0) == 0


@given(
    st.sampled_from(COLLECTIVES),
    st.sets(st.integers(0, 15), min_size=2),
    st.floats(1, 1e9),
    st.floats(1.01, 10),
)
def test_collectives_never_beat_the_bytes_that_must_move(collective, group, size, more) -> None:  # type: ignore[no-untyped-def]
    toy = cluster(16, 4)
    count = len(group)
    cost = collective(toy, tuple(group))
    received = (2 if collective is all_reduce else 1) * (count - 1) / count
    assert cost.seconds(size) >= received * size / FAST * 0.999
    assert cost.seconds(size) < cost.seconds(size * more) <= more * cost.seconds(size) * 1.001
    assert cost.seconds_each(communication.np.array([size]))[0] == pytest.approx(cost.seconds(size))


def test_tied_together_a_gather_and_a_scatter_make_a_reduction() -> None:
    toy = cluster(8, 4)
    both = all_gather(toy, range(8)).seconds(1e8) + reduce_scatter(toy, range(8)).seconds(1e8)
    assert all_reduce(toy, range(8)).seconds(1e8) <= both * 1.001
