"""Cuts and devices against every way there is."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.analysis.chain import range_sums
from autopipe.passes.partition.chain_cut import (
    best_run_ends,
    even_run_ends,
    limit_runs_to_memory,
    run_lengths,
)
from autopipe.passes.placement.tessel_shapes import divide_devices

SECONDS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(SECONDS, st.data())
def test_the_slowest_run_is_fastest(seconds: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(seconds)))
    inner = data.draw(
        st.lists(st.integers(0, 5), min_size=len(seconds) - 1, max_size=len(seconds) - 1)
    )
    crossing = np.array([0, *inner, 0], float)
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=len(seconds), max_size=len(seconds)))
    room = data.draw(st.lists(st.sampled_from([1, 4, 8, np.inf]), min_size=count, max_size=count))

    def slowest(stops: tuple[int, ...]) -> float:
        runs = zip((0, *stops[:-1]), stops, strict=True)
        return float(
            max(sum(seconds[start:stop]) + crossing[start] + crossing[stop] for start, stop in runs)
        )

    def has_room(stops: tuple[int, ...]) -> bool:
        runs = zip((0, *stops[:-1]), stops, room, strict=True)
        return all(sum(sizes[start:stop]) <= most for start, stop, most in runs)

    work = np.array(seconds, float)
    lengths = [run_lengths(work, crossing, crossing)] * count
    weights = range_sums(np.array(sizes, float))
    found = tuple(
        best_run_ends(limit_runs_to_memory(lengths, weights, room), even_run_ends(work, count))
    )
    every = [
        (*cuts, len(seconds)) for cuts in itertools.combinations(range(1, len(seconds)), count - 1)
    ]
    possible = list(filter(has_room, every))
    assert found in possible or (not found and not possible)
    assert not possible or slowest(found) == min(map(slowest, possible))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 6))
def test_devices_go_where_most_work_is(weights: list[int], more: int) -> None:
    devices = len(weights) + more
    groups = divide_devices(weights, devices)
    assert [device for group in groups for device in group] == list(range(devices))
    every = (
        counts
        for counts in itertools.product(range(1, devices + 1), repeat=len(weights))
        if sum(counts) == devices
    )
    least = min(
        max(weight / count for weight, count in zip(weights, counts, strict=True))
        for counts in every
    )
    assert max(weight / len(group) for weight, group in zip(weights, groups, strict=True)) == least
