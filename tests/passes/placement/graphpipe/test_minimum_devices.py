"""The fewest devices told without levels, against the search that has them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.placement.graphpipe.search import UNREACHABLE, TargetProbe, minimum_devices
from autopipe.passes.placement.graphpipe.series_parallel import BlockRun, Fork, Region

LINES: tuple[tuple[Region, ...], ...] = (
    (BlockRun(0, 6),),
    (BlockRun(0, 1), Fork(((BlockRun(1, 3),), (BlockRun(3, 5),)), 1, 5), BlockRun(5, 6)),
    (Fork(((BlockRun(0, 2),), (BlockRun(2, 3),), (BlockRun(3, 5),)), 0, 5), BlockRun(5, 6)),
    (
        BlockRun(0, 1),
        Fork(
            (
                (BlockRun(1, 2), Fork(((BlockRun(2, 3),), (BlockRun(3, 4),)), 2, 4)),
                (BlockRun(4, 5),),
            ),
            1,
            5,
        ),
        BlockRun(5, 6),
    ),
)


@given(
    st.sampled_from(LINES),
    st.sampled_from([(4,), (6,), (2, 3)]),
    st.lists(st.sampled_from([1, 1, 2, 3, UNREACHABLE]), min_size=72, max_size=72),
)
def test_levels_change_nothing_where_needs_are_the_same_at_all(
    regions: tuple[Region, ...], runs: tuple[int, ...], figures: list[int]
) -> None:
    needs = tuple(
        np.array(figures[36 * run : 36 * (run + 1)] + [UNREACHABLE] * 13, np.int16).reshape(7, 7)
        for run in range(len(runs))
    )
    for each in needs:
        each[np.tril_indices(7)] = UNREACHABLE
    found = TargetProbe(lambda level: needs, 7, runs, 6).solve(regions)[0]
    assert min(minimum_devices(needs, runs), UNREACHABLE) == min(found, UNREACHABLE)
