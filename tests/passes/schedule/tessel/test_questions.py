"""Single questions that the search is made of: fewer units in flight, all units at once, limits,
room.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from brute_force import least_makespan
from hypothesis import given, settings, strategies
from random_blocks import block_graphs
from replay import faults

from autopipe.ir.block_schedule import Block, BlockGraph, BlockSchedule
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.passes.schedule.published.blocks import shape_blocks
from autopipe.passes.schedule.tessel.model import (
    Budget,
    PeriodicStarts,
    SearchOptions,
    is_valid,
    makespan_bound,
    period_bound,
)
from autopipe.passes.schedule.tessel.periodic import construct, one_at_a_time, tighten
from autopipe.passes.schedule.tessel.search import one_by_one_order, search
from autopipe.passes.solvers.cp_sat import Limit
from benchmarks.tessel_baselines import search_in_flight, search_whole


@pytest.mark.parametrize(("in_flight", "period"), [(1, 16), (2, 8), (3, 8), (4, 4), (5, 4)])
def test_more_units_in_flight_make_shorter_repetends(in_flight: int, period: int) -> None:
    schedule = search_in_flight(shape_blocks("v", 4, True, 4), 12, in_flight)
    assert schedule.repetend is not None
    assert (schedule.period, schedule.optimal) == (period, True)
    assert max(schedule.repetend.offsets) < in_flight
    assert faults(schedule, 12) == []


def test_a_repetend_says_where_blocks_stand() -> None:
    """Repeating it without end is a schedule, in both forms: of all units, and of few in flight."""
    graph = shape_blocks("nn", 4, True, 6)
    for schedule in (search(graph, 40), search_in_flight(graph, 40, 4)):
        repetend = schedule.repetend
        period = schedule.period
        assert repetend is not None and period is not None
        last = max(repetend.offsets)
        rows = [
            tuple(
                start + period * (unit + last - offset)
                for start, offset in zip(repetend.starts, repetend.offsets, strict=True)
            )
            for unit in range(9)
        ]
        assert faults(BlockSchedule(graph, tuple(rows)), 9) == []
        assert min(repetend.offsets) == 0


@settings(max_examples=25)
@given(block_graphs(blocks=4, devices=3, times=(1, 4)), strategies.integers(1, 2))
def test_all_units_at_once_equal_the_best_of_all_orders(graph: BlockGraph, units: int) -> None:
    best = least_makespan(graph, units)
    if best is None:
        with pytest.raises(InfeasibleError):
            search_whole(graph, units)
    else:
        schedule = search_whole(graph, units)
        assert (schedule.makespan, schedule.lower_bound, schedule.optimal) == (best, best, True)
        assert makespan_bound(graph, units) <= best


@settings(max_examples=100, deadline=None)
@given(block_graphs(blocks=4, devices=3, times=(1, 6), rooms=False), strategies.integers(1, 2))
def test_no_order_is_shorter_than_the_bound(graph: BlockGraph, units: int) -> None:
    """Some blocks run on all devices, some on a part, some beside the blocks with the most
    devices.
    """
    best = least_makespan(graph, units)
    assert best is not None
    assert makespan_bound(graph, units) <= best


@pytest.mark.parametrize("units", [1, 4, 32])
@pytest.mark.parametrize(("name", "load"), [("m", 6), ("nn", 8)])
def test_blocks_on_all_devices_do_not_fill_the_gaps_of_others(
    name: str, load: int, units: int
) -> None:
    """Between blocks on all devices there is a chain that takes 12 to reach its last device and
    come back.

    The schedule meets the bound, so that no smaller number of units is searched to be repeated.
    """
    graph = shape_blocks(name, 4, True, 6)
    assert makespan_bound(graph, units) == units * load + 12
    assert search(graph, units).makespan == units * load + 12


def test_delays_do_not_count_beside_blocks_on_all_devices() -> None:
    """A wide block runs while the second narrow block waits for the first one's result, so nothing
    is idle.
    """
    first = Block("a", (0,), 2)
    second = Block("b", (1,), 2, 0, (0,), (3,))
    graph = BlockGraph(2, (first, second, Block("wide", (0, 1), 3)), (None, None))
    assert makespan_bound(graph, 1) == least_makespan(graph, 1) == 7


@settings(max_examples=60)
@given(block_graphs(blocks=12, devices=4, times=(5, 50)))
def test_constructed_steady_states_keep_all_rules(graph: BlockGraph) -> None:
    try:
        serial = one_by_one_order(graph, 1, Limit(5, 1))
    except InfeasibleError:
        return
    bound = period_bound(graph)
    found = construct(graph, bound, serial, Budget(SearchOptions()))
    assert is_valid(graph, found)
    assert found.period >= bound
    again = tighten(graph, found, found.period)
    assert again.latency(graph) <= found.latency(graph)
    assert is_valid(graph, again)


def test_the_same_seed_gives_the_same_schedule() -> None:
    graph = shape_blocks("x", 8, True, 8)
    options = SearchOptions(time_limit=0.5, seed=3, patience=60.0)
    small = replace(graph, memory=(5,) * 8)
    for each, units in ((graph, 20), (shape_blocks("m", 4, True, 3), 9), (small, 1)):
        first = search(each, units, options)
        second = search(each, units, options)
        assert (first.starts, first.lower_bound) == (second.starts, second.lower_bound)


def test_the_time_limit_is_kept_and_progress_is_told_of_it() -> None:
    told: list[tuple[int | None, int, float]] = []
    graph = shape_blocks("nn", 32, True, 17, forward=1009, backward=2503)
    before = time.perf_counter()
    schedule = search(
        graph, 40, SearchOptions(time_limit=0.5, progress=lambda *each: told.append(each))
    )
    assert time.perf_counter() - before < 10
    assert faults_are_none(schedule)
    assert 1 <= len(told) <= 7
    assert all(bound <= (schedule.period or 0) for _, bound, _ in told)


def faults_are_none(schedule: BlockSchedule) -> bool:
    """For times that are too long to be played tick by tick: one tick stands for a hundred."""
    return all(
        start + schedule.graph.blocks[index].time <= following
        for tasks in schedule.tasks
        for (start, _, index), (following, _, _) in pairwise(tasks)
    )


def test_gap_is_told_where_nothing_is_proven() -> None:
    schedule = search(
        shape_blocks("x", 8, True, 5, forward=1009, backward=2503),
        30,
        SearchOptions(time_limit=0.3),
    )
    assert schedule.repetend is not None
    if not schedule.optimal:
        assert schedule.lower_bound < (schedule.period or 0)
        assert 0 < schedule.gap < 1


def test_too_little_memory_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"device 0.*\b1\b"):
        search(shape_blocks("v", 4, True, 0), 8)
    graph = BlockGraph(
        1,
        (Block("a", (0,), 1, 3), Block("b", (0,), 1, 2, (0,)), Block("c", (0,), 1, -5, (1,))),
        (4,),
    )
    with pytest.raises(InfeasibleError, match=r"device 0.*\b5\b"):
        search(graph, 8)


def test_memory_that_a_unit_keeps_is_there_for_all_units() -> None:
    graph = BlockGraph(1, (Block("a", (0,), 1, 3), Block("b", (0,), 1, -2, (0,))), (6,))
    schedule = search(graph, 4)
    assert faults(schedule, 4) == []
    with pytest.raises(InfeasibleError):
        search(graph, 5)


def test_bad_input_is_refused() -> None:
    graph = shape_blocks("v", 4, True, 4)
    for ask in (search, search_whole, lambda each, units: search_in_flight(each, units, 2)):
        with pytest.raises(ConfigurationError, match="number of micro-batches is"):
            ask(graph, 0)
        with pytest.raises(ConfigurationError, match="circle"):
            ask(
                BlockGraph(
                    1, (Block("a", (0,), 1, 0, (1,)), Block("b", (0,), 1, 0, (0,))), (None,)
                ),
                2,
            )


@settings(max_examples=40)
@given(block_graphs(blocks=8, devices=3, times=(5, 50), rooms=False))
def test_an_order_is_tightened_to_the_least_period_that_it_allows(graph: BlockGraph) -> None:
    """One tick less, and blocks put off again and again never come to rest."""
    order = one_at_a_time(graph, graph.order)
    found = tighten(graph, order, 1)
    assert max(graph.loads) <= found.period <= order.period
    assert is_valid(graph, found)
    assert settles(graph, order, found.period)
    assert not settles(graph, order, found.period - 1)


def settles(graph: BlockGraph, order: PeriodicStarts, period: int) -> bool:
    """Whether starts come to rest when each is put off until its waits and the block before it on
    each device allow.

    The order holds each unit's blocks one after the other: the last of a device is before the first
    of the next unit.
    """
    waits = [
        (other, index, graph.blocks[other].time + block.delay(position))
        for index, block in enumerate(graph.blocks)
        for position, other in enumerate(block.after)
    ]
    for device in range(graph.devices):
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        members.sort(key=lambda index: order.starts[index])
        waits += [(before, after, graph.blocks[before].time) for before, after in pairwise(members)]
        if members:
            waits.append((members[-1], members[0], graph.blocks[members[-1]].time - period))
    starts = [0] * len(graph.blocks)
    for _ in range(len(graph.blocks) + 1):
        before = list(starts)
        for first, second, wait in waits:
            starts[second] = max(starts[second], starts[first] + wait)
        if starts == before:
            return True
    return False
