"""GPipe and 1F1B on chains (against the papers) and on random DAGs (against the checker and bounds
of the micro-batches in flight).
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_dags import chain, stage_graphs

from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, depths_to_end
from autopipe.ir.timeline import StagePrediction
from autopipe.passes.schedule.predict import make_ticks
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb

BOTH = pytest.mark.parametrize("order", [order_gpipe, order_kfkb])
UNEQUAL = st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=6, max_size=6)


def ticks(times):
    return make_ticks([StagePrediction(*each) for each in times])


UNIT = ticks([(1.0, 2.0)] * 64)


def in_flight(order, stage):
    """Return the maximum number of micro-batches of a stage between forward and backward."""
    held = itertools.accumulate(
        (1 if task.phase is Phase.FORWARD else -1) for task in order if task.stage == stage
    )
    return max(held, default=0)


def longest_paths(graph: StageGraph) -> list[int]:
    """Return the number of stages on the longest path from each stage, by trying all paths."""
    after = {
        stage: [b for a, b in graph.edges if a == stage]
        for stage in range(len(graph.stage_devices))
    }

    def longest(stage):
        return 1 + max((longest(each) for each in after[stage]), default=0)

    return [longest(stage) for stage in after]


def lines_of(schedule: Schedule) -> list[int]:
    """Return the number of lines of each device's list if its repetend is written once."""
    pairs = zip(schedule.tasks, schedule.repetends, strict=True)
    return [len(tasks) - each.length * (each.count - 1) for tasks, each in pairs]


def test_1f1b_of_a_chain_equals_the_published_order():
    # Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", figure 3, for four
    # stages.
    schedule = order_kfkb(chain(4), 6, True, UNIT)
    assert schedule.grid().splitlines() == [
        "0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
        "1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
        "3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ]


@given(UNEQUAL, st.integers(1, 6), st.integers(1, 8))
def test_1f1b_of_a_chain_does_not_depend_on_times(times, stages, micro_batches):
    graph = chain(stages)
    unequal, equal = (order_kfkb(graph, micro_batches, True, each) for each in (ticks(times), UNIT))
    assert unequal == equal


def test_1f1b_of_branches_has_as_many_in_flight_as_the_longest_path():
    # Stage 0 sends to 1-2 and to 3, and both branches send to 4. As in GraphPipe, stage 0 has 4
    # micro-batches in flight, not 5.
    graph = StageGraph(
        5, tuple((stage,) for stage in range(5)), ((0, 1), (0, 3), (1, 2), (2, 4), (3, 4))
    )
    schedule = order_kfkb(graph, 8, True, UNIT)
    assert [in_flight(order, stage) for stage, order in enumerate(schedule.tasks)] == [
        4,
        3,
        2,
        2,
        1,
    ]


def test_gpipe_runs_forwards_before_backwards():
    schedule = order_gpipe(chain(2), 3, True, UNIT)
    assert schedule.grid().splitlines() == [
        "0: 0F0 0F1 0F2 0B0 0B1 0B2",
        "1: 1F0 1F1 1F2 1B0 1B1 1B2",
    ]


@BOTH
@settings(max_examples=150, deadline=None)
@given(stage_graphs(), st.integers(1, 7), st.booleans(), UNEQUAL)
def test_schedules_of_any_dag_can_run(order, graph, micro_batches, train, times):
    order(graph, micro_batches, train, ticks(times)).verify(graph, train)


@settings(max_examples=150, deadline=None)
@given(stage_graphs(), st.integers(1, 7), UNEQUAL)
def test_1f1b_bounds_micro_batches_in_flight_on_any_dag(graph, micro_batches, times):
    schedule = order_kfkb(graph, micro_batches, True, ticks(times))
    bounds = longest_paths(graph)
    assert list(depths_to_end(len(bounds), graph.edges)) == bounds
    for stage, devices in enumerate(graph.stage_devices):
        assert in_flight(schedule.tasks[devices[0]], stage) == min(bounds[stage], micro_batches)


@BOTH
@settings(max_examples=60, deadline=None)
@given(stage_graphs(), st.integers(1, 9), st.booleans())
def test_repetends_occur_in_the_lists(order, graph, micro_batches, train):
    schedule = order(graph, micro_batches, train, UNIT)
    for tasks, repetend in zip(schedule.tasks, schedule.repetends, strict=True):
        body = tasks[repetend.start : repetend.start + repetend.length]
        rolled = [
            Task(task.stage, task.phase, task.micro_batch + index * repetend.stride)
            for index in range(repetend.count)
            for task in body
        ]
        assert (
            list(tasks[repetend.start : repetend.start + repetend.length * repetend.count])
            == rolled
        )
        assert repetend.length == 0 or repetend.count >= 2


@pytest.mark.parametrize("micro_batches", [16, 64])
def test_lines_of_1f1b_do_not_grow_with_micro_batches(micro_batches):
    assert lines_of(order_kfkb(chain(4), micro_batches, True, UNIT)) == [8, 6, 4, 2]


def test_a_v_shape_reaches_a_steady_state():
    # Two stages per device: 0 1 2 3 3 2 1 0.
    graph = StageGraph(
        4, ((0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)), tuple((i, i + 1) for i in range(7))
    )
    short, long = (order_kfkb(graph, count, True, UNIT) for count in (40, 80))
    assert lines_of(short) == lines_of(long)
