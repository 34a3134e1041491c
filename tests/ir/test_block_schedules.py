"""Schedules of blocks: the check, and the file, which is refused where it does not match its
blocks.
"""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.block_schedule import (
    Block,
    BlockGraph,
    BlockRepetend,
    BlockSchedule,
    block_schedule_json,
    check_start_times,
    read_block_schedule,
)
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.files import document_text

# Two devices. A micro-batch runs F0 on device 0 (length 1), T on both devices 2 after the end of F0
# (length 1), and B0 on device 0 (length 3).
GRAPH = BlockGraph(
    2,
    (Block("F0", (0,), 1, 2), Block("T", (0, 1), 1, 0, (0,), (2,)), Block("B0", (0,), 3, -2, (1,))),
    (2, None),
)
STARTS = ((0, 3, 4), (7, 10, 11))
SCHEDULE = BlockSchedule(GRAPH, STARTS, 7, 5, False, BlockRepetend((0, 3, 4), (0, 0, 0)), 0.5)


def test_figures_follow_from_the_starts():
    check_start_times(SCHEDULE)
    assert (SCHEDULE.units, SCHEDULE.makespan, SCHEDULE.peak_memory) == (2, 14, (2, 0))
    assert SCHEDULE.gap == pytest.approx(2 / 7)
    assert SCHEDULE.steady_bubble_rate == pytest.approx(2 / 7)
    assert dataclasses.replace(SCHEDULE, optimal=True).gap == 0.0
    whole = dataclasses.replace(SCHEDULE, period=None, repetend=None, lower_bound=14)
    assert (whole.gap, whole.steady_bubble_rate) == (0.0, None)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        (
            ((0, 3, 4), (7, 10)),
            "micro-batch 1: the number of starts is 2, expected one for each of 3 blocks",
        ),
        (
            ((0, 3, 4), (7, 10, 10)),
            "'B0' of micro-batch 1 starts at 10, but requires block 'T' of micro-batch 1, whose",
        ),
        (
            ((0, 2, 4), (7, 10, 11)),
            "starts at 2, but requires block 'F0' of micro-batch 0, whose result arrives at 3",
        ),
        (((-1, 3, 4), (7, 10, 11)), "'F0' of micro-batch 0 starts at -1, expected 0 or later"),
        (
            ((0, 3, 4), (6, 10, 11)),
            "device 0: block 'F0' of micro-batch 1 starts at 6, but block 'B0' of micro-batch 0 runs",
        ),
        (
            ((0, 4, 5), (1, 8, 9)),
            "device 0: memory in use is 4 when block 'F0' of micro-batch 1 starts, above the limit of 2",
        ),
    ],
)
def test_what_cannot_run_is_named(starts, expected):
    with pytest.raises(InfeasibleError) as caught:
        check_start_times(dataclasses.replace(SCHEDULE, starts=starts))
    assert expected in str(caught.value)


def blocks():
    return st.builds(
        Block,
        st.text(max_size=5),
        st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
        st.integers(1, 50),
        st.integers(-3, 3),
    )


@given(st.lists(blocks(), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_a_file_gives_the_schedule_again(tmp_path_factory, given_blocks, units, data):
    chained = tuple(
        dataclasses.replace(
            block, after=(index - 1,), delays=data.draw(st.sampled_from(((), (3,))))
        )
        if index
        else block
        for index, block in enumerate(given_blocks)
    )
    graph = BlockGraph(3, chained, (None, 1000, None), data.draw(st.integers(1, 2)))
    starts = []
    now = 0
    for _ in range(units):
        row = []
        for block in chained:
            row.append(now + block.delay(0))
            now = row[-1] + block.time
        starts.append(tuple(row))
    schedule = BlockSchedule(graph, tuple(starts), None, 3, False, None, 0.25)
    path = tmp_path_factory.mktemp("schedules") / "schedule.json"
    path.write_text(document_text(block_schedule_json(schedule)), encoding="utf-8")
    assert read_block_schedule(path) == schedule


def read(folder, form):
    path = folder / "schedule.json"
    path.write_text(json.dumps(form), encoding="utf-8")
    return read_block_schedule(path)


def changed(path, value):
    form = json.loads(document_text(block_schedule_json(SCHEDULE)))
    place = form
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return form


def test_a_file_without_room_and_unit_is_taken(tmp_path):
    form = changed(["memory"], None)
    del form["micro_batches_per_unit"]
    found = read(tmp_path, form)
    assert found.starts == STARTS
    assert (found.graph.memory, found.graph.micro_batches_per_unit) == ((None, None), 1)


REFUSED = {
    "another format": (["format"], "autopipe.plan/1", "the format is"),
    "a plan's": (["repetends"], [], "the schedule of a plan, not of blocks (give the folder"),
    "too many devices": (["devices"], 10**9, "devices is 1000000000"),
    "a device more": (["devices"], 3, "memory limits is 2, expected one for each of 3 devices"),
    "a block on a device that is not there": (
        ["blocks", 0, "devices"],
        [2],
        "the block is on device 2, which",
    ),
    "a block on none": (["blocks", 0, "devices"], [], "block 'F0': the block is on no device"),
    "no time": (["blocks", 0, "time"], 0, "block 'F0': the time of the block is 0"),
    "half a time": (["blocks", 0, "time"], 0.5, "blocks[0].time is 0.5"),
    "a circle": (["blocks", 0, "after"], [2], "wait in a circle"),
    "a longer block": (
        ["blocks", 2, "time"],
        4,
        "device 0: block 'F0' of micro-batch 1 starts at 7, but block 'B0' of micro-batch 0 runs",
    ),
    "less room": (
        ["memory", 0],
        1,
        "device 0: memory in use is 2 when block 'F0' of micro-batch 0 starts, above the limit of 1",
    ),
    "an earlier start": (
        ["tasks", 0, 0, "start"],
        1,
        "'T' of micro-batch 0 starts at 3, but requires block 'F0' of micro-batch 0",
    ),
    "an endless start": (
        ["tasks", 0, 0, "start"],
        2**60,
        "tasks[0][0].start is 1152921504606846976",
    ),
    "two starts": (
        ["tasks", 1, 0, "start"],
        2,
        "'T' of micro-batch 0 does not start at one time on all its devices",
    ),
    "a task less": (["tasks", 0, 0], None, "block 'F0' of micro-batch 0 does not run"),
    "half a task": (
        ["tasks", 1, 0],
        None,
        "block 'T' of micro-batch 0 does not start at one time on all",
    ),
    "a task twice": (
        ["tasks", 0, 1],
        {"block": 0, "unit": 0, "start": 1},
        "expected a task that occurs once",
    ),
    "a task of another device": (["tasks", 1, 0, "block"], 0, "tasks[1][0].block is 0"),
    "a task of no block": (["tasks", 1, 0, "block"], 9, "tasks[1][0].block is 9"),
    "a unit less": (["units"], 1, "expected the number of a micro-batch below 1"),
    "units without end": (["units"], 10**15, "block 'F0' of micro-batch 2 does not run"),
    "a list less": (["tasks"], [[]], "expected one list for each of 2 devices"),
    "another makespan": (
        ["makespan"],
        13,
        "makespan is 13 (expected the end of the last task, which is 14)",
    ),
    "half a repetend": (
        ["repetend", "starts"],
        [0],
        "expected a list of one number for each of 3 blocks",
    ),
    "no bound": (["lower_bound"], None, "lower_bound is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_does_not_match_its_blocks_is_refused(tmp_path, case):
    path, value, expected = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, changed(path, copy.deepcopy(value)))
    assert expected in str(caught.value)
    assert "schedule.json" in str(caught.value)
    assert "\n" not in str(caught.value)
