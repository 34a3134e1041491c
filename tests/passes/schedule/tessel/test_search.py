"""Searched schedules of random block graphs, against a replay and against exact optima."""

from __future__ import annotations

import pytest
from brute_force import minimum_makespan, minimum_period
from hypothesis import given, settings, strategies
from random_blocks import block_graphs
from replay import faults

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.tessel.model import Budget, SearchOptions
from autopipe.passes.schedule.tessel.search import best_steady_state, search

BRIEF = SearchOptions(time_limit=1.0)


@settings(max_examples=40)
@given(block_graphs(blocks=10, devices=4, times=(5, 50)), strategies.integers(1, 9))
def test_searched_schedules_are_valid(graph: BlockGraph, micro_batches: int) -> None:
    try:
        schedule = search(graph, micro_batches, BRIEF)
    except InfeasibleError:
        assert any(room is not None for room in graph.memory)
        return
    assert faults(schedule, micro_batches) == []
    value = schedule.period if schedule.repetend else schedule.makespan
    assert value is not None
    assert value >= schedule.lower_bound
    assert schedule.optimal == (value == schedule.lower_bound)
    assert min(start for starts in schedule.starts for start in starts) == 0


@settings(max_examples=40)
@given(block_graphs(blocks=4, devices=3, times=(1, 4)), strategies.integers(1, 2))
def test_few_micro_batches_reach_the_minimum_makespan(
    graph: BlockGraph, micro_batches: int
) -> None:
    best = minimum_makespan(graph, micro_batches)
    if best is None:
        with pytest.raises(InfeasibleError):
            search(graph, micro_batches)
    else:
        assert search(graph, micro_batches).makespan == best


@settings(max_examples=40)
@given(block_graphs(blocks=4, devices=2, times=(1, 2)))
def test_the_period_is_the_minimum(graph: BlockGraph) -> None:
    try:
        steady, bound = best_steady_state(graph, 1, Budget(SearchOptions()))
    except InfeasibleError:
        assert minimum_makespan(graph, 1) is None
        return
    assert steady.period == minimum_period(graph, steady.period)
    assert bound == steady.period


def chain_graph(
    times: tuple[int, ...], memory: tuple[int, ...], rooms: tuple[int, ...]
) -> BlockGraph:
    """Return the forwards of one stage per device, then backwards that take twice as long and free
    the memory of the forwards.
    """
    count = len(times)
    forwards = [
        Block(f"F{s}", (s,), times[s], memory[s], (s - 1,) if s else ()) for s in range(count)
    ]
    backwards = [
        Block(f"B{s}", (s,), 2 * times[s], -memory[s], (2 * count - 2 - s,))
        for s in reversed(range(count))
    ]
    return BlockGraph(count, (*forwards, *backwards), rooms)


def test_eight_micro_batches_take_no_longer_than_four_twice() -> None:
    # The search for a steady state gives 231 for 8 micro-batches; 4 micro-batches in one problem
    # take 111.
    graph = chain_graph((9, 7), (3, 2), (12, 8))
    options = SearchOptions(time_limit=1.0, patience=20.0, unrolled=60)
    few = search(graph, 4, options)
    many = search(graph, 8, options)
    assert few.makespan == 111
    assert faults(many, 8) == []
    assert many.makespan <= 2 * few.makespan


@settings(max_examples=30, deadline=None)
@given(
    block_graphs(blocks=6, devices=3, times=(1, 9)),
    strategies.integers(1, 4),
    strategies.integers(2, 3),
)
def test_micro_batches_take_no_longer_than_fewer_repeated(
    graph: BlockGraph, part: int, times: int
) -> None:
    options = SearchOptions(time_limit=1.0, patience=20.0, unrolled=12)
    try:
        few = search(graph, part, options)
        many = search(graph, part * times, options)
    except InfeasibleError:
        return
    assert faults(many, part * times) == []
    assert many.makespan <= times * few.makespan
