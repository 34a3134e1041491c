"""Steps of the search: limits of micro-batches in flight, all micro-batches at once, time limits,
memory limits.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from brute_force import minimum_makespan
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
from autopipe.passes.schedule.tessel.periodic import (
    construct_steady_state,
    serial_steady_state,
    shorten_period,
)
from autopipe.passes.schedule.tessel.search import one_by_one_order, search
from autopipe.passes.solvers.cp_sat import Limit
from benchmarks.tessel_baselines import search_all_at_once, search_in_flight


@pytest.mark.parametrize(("in_flight", "period"), [(1, 16), (2, 8), (3, 8), (4, 4), (5, 4)])
def test_more_micro_batches_in_flight_make_shorter_repetends(in_flight: int, period: int) -> None:
    schedule = search_in_flight(shape_blocks("v", 4, True, 4), 12, in_flight)
    assert schedule.repetend is not None
    assert (schedule.period, schedule.optimal) == (period, True)
    assert max(schedule.repetend.offsets) < in_flight
    assert faults(schedule, 12) == []


def test_a_repetend_can_be_repeated_endlessly() -> None:
    """Repetitions of the repetend are a valid schedule, for all micro-batches at once and for few
    in flight.
    """
    graph = shape_blocks("nn", 4, True, 6)
    for schedule in (search(graph, 40), search_in_flight(graph, 40, 4)):
        repetend = schedule.repetend
        period = schedule.period
        assert repetend is not None and period is not None
        last = max(repetend.offsets)
        rows = [
            tuple(
                start + period * (micro_batch + last - offset)
                for start, offset in zip(repetend.starts, repetend.offsets, strict=True)
            )
            for micro_batch in range(9)
        ]
        assert faults(BlockSchedule(graph, tuple(rows)), 9) == []
        assert min(repetend.offsets) == 0


@settings(max_examples=25)
@given(block_graphs(blocks=4, devices=3, times=(1, 4)), strategies.integers(1, 2))
def test_all_micro_batches_at_once_give_the_minimum_makespan(
    graph: BlockGraph, micro_batches: int
) -> None:
    best = minimum_makespan(graph, micro_batches)
    if best is None:
        with pytest.raises(InfeasibleError):
            search_all_at_once(graph, micro_batches)
    else:
        schedule = search_all_at_once(graph, micro_batches)
        assert (schedule.makespan, schedule.lower_bound, schedule.optimal) == (best, best, True)
        assert makespan_bound(graph, micro_batches) <= best


@settings(max_examples=100, deadline=None)
@given(block_graphs(blocks=4, devices=3, times=(1, 6), limits=False), strategies.integers(1, 2))
def test_no_order_is_below_the_makespan_bound(graph: BlockGraph, micro_batches: int) -> None:
    """There are blocks on all devices, blocks on some devices, and blocks on devices without a
    block of the first kind.
    """
    best = minimum_makespan(graph, micro_batches)
    assert best is not None
    assert makespan_bound(graph, micro_batches) <= best


@pytest.mark.parametrize("micro_batches", [1, 4, 32])
@pytest.mark.parametrize(("name", "load"), [("m", 6), ("nn", 8)])
def test_the_bound_separates_blocks_on_all_devices(
    name: str, load: int, micro_batches: int
) -> None:
    """Between blocks on all devices there is a chain that takes 12 to reach its last device and
    return. The schedule reaches the bound, so the search does not try fewer micro-batches,
    repeated.
    """
    graph = shape_blocks(name, 4, True, 6)
    assert makespan_bound(graph, micro_batches) == micro_batches * load + 12
    assert search(graph, micro_batches).makespan == micro_batches * load + 12


def test_delays_can_overlap_with_blocks_on_all_devices() -> None:
    """A wide block runs while the second narrow block waits for the message of the first, so no
    device idles.
    """
    first = Block("a", (0,), 2)
    second = Block("b", (1,), 2, 0, (0,), (3,))
    graph = BlockGraph(2, (first, second, Block("wide", (0, 1), 3)), (None, None))
    assert makespan_bound(graph, 1) == minimum_makespan(graph, 1) == 7


@settings(max_examples=60)
@given(block_graphs(blocks=12, devices=4, times=(5, 50)))
def test_constructed_steady_states_are_valid(graph: BlockGraph) -> None:
    try:
        serial = one_by_one_order(graph, 1, Limit(5, 1))
    except InfeasibleError:
        return
    bound = period_bound(graph)
    found = construct_steady_state(graph, bound, serial, Budget(SearchOptions()))
    assert is_valid(graph, found)
    assert found.period >= bound
    again = shorten_period(graph, found, found.period)
    assert again.latency(graph) <= found.latency(graph)
    assert is_valid(graph, again)


def test_the_same_seed_gives_the_same_schedule() -> None:
    graph = shape_blocks("x", 8, True, 8)
    options = SearchOptions(time_limit=0.5, seed=3, patience=60.0)
    small = replace(graph, memory=(5,) * 8)
    for each, micro_batches in ((graph, 20), (shape_blocks("m", 4, True, 3), 9), (small, 1)):
        first = search(each, micro_batches, options)
        second = search(each, micro_batches, options)
        assert (first.starts, first.lower_bound) == (second.starts, second.lower_bound)


def test_the_time_limit_is_kept_and_progress_is_reported() -> None:
    told: list[tuple[int | None, int, float]] = []
    graph = shape_blocks("nn", 32, True, 17, forward=1009, backward=2503)
    before = time.perf_counter()
    schedule = search(
        graph, 40, SearchOptions(time_limit=0.5, progress=lambda *each: told.append(each))
    )
    assert time.perf_counter() - before < 10
    assert assert_valid(schedule)
    assert 1 <= len(told) <= 7
    assert all(bound <= (schedule.period or 0) for _, bound, _ in told)


def assert_valid(schedule: BlockSchedule) -> bool:
    """Check a schedule whose times are too long to be replayed tick by tick, with one tick per
    hundred.
    """
    return all(
        start + schedule.graph.blocks[index].time <= following
        for tasks in schedule.tasks
        for (start, _, index), (following, _, _) in pairwise(tasks)
    )


def test_a_gap_is_reported_without_a_proof() -> None:
    schedule = search(
        shape_blocks("x", 8, True, 5, forward=1009, backward=2503),
        30,
        SearchOptions(time_limit=0.3),
    )
    assert schedule.repetend is not None
    if not schedule.optimal:
        assert schedule.lower_bound < (schedule.period or 0)
        assert 0 < schedule.gap < 1


def test_insufficient_memory_is_rejected_with_the_needed_memory() -> None:
    with pytest.raises(InfeasibleError, match=r"device 0.*\b1\b"):
        search(shape_blocks("v", 4, True, 0), 8)
    graph = BlockGraph(
        1,
        (Block("a", (0,), 1, 3), Block("b", (0,), 1, 2, (0,)), Block("c", (0,), 1, -5, (1,))),
        (4,),
    )
    with pytest.raises(InfeasibleError, match=r"device 0.*\b5\b"):
        search(graph, 8)


def test_memory_that_is_never_freed_counts_for_all_micro_batches() -> None:
    graph = BlockGraph(1, (Block("a", (0,), 1, 3), Block("b", (0,), 1, -2, (0,))), (6,))
    schedule = search(graph, 4)
    assert faults(schedule, 4) == []
    with pytest.raises(InfeasibleError):
        search(graph, 5)


def test_invalid_input_is_rejected() -> None:
    graph = shape_blocks("v", 4, True, 4)
    for ask in (
        search,
        search_all_at_once,
        lambda each, micro_batches: search_in_flight(each, micro_batches, 2),
    ):
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
@given(block_graphs(blocks=8, devices=3, times=(5, 50), limits=False))
def test_tighten_finds_the_minimum_period_of_an_order(graph: BlockGraph) -> None:
    """With a period shorter by one tick, the delays of blocks never end."""
    order = serial_steady_state(graph, graph.order)
    found = shorten_period(graph, order, 1)
    assert max(graph.loads) <= found.period <= order.period
    assert is_valid(graph, found)
    assert converges(graph, order, found.period)
    assert not converges(graph, order, found.period - 1)


def converges(graph: BlockGraph, order: PeriodicStarts, period: int) -> bool:
    """True if starts converge when each block is delayed until its dependencies and the block
    before it on each device permit. In the order, the blocks of a micro-batch follow one another,
    and the last block of a device comes before the first one of the next micro-batch.
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
