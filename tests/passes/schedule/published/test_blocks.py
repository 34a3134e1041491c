"""Published schedules on block graphs: the bubbles of Table II of the Tessel paper, rejections, and
validity of all starts.
"""

from __future__ import annotations

import pytest

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.passes.schedule.published.blocks import (
    block_schedule_names,
    schedule_blocks,
    shape_blocks,
)


def violations(schedule):
    """Return all violations of dependencies, and all overlaps of blocks on a device."""
    blocks = schedule.graph.blocks
    broken = [
        (micro_batch, index)
        for micro_batch, starts in enumerate(schedule.starts)
        for index, block in enumerate(blocks)
        if any(starts[other] + blocks[other].time > starts[index] for other in block.after)
    ]
    for tasks in schedule.tasks:
        ends = [start + blocks[index].time for start, _, index in tasks]
        broken += [
            tasks[place] for place in range(1, len(tasks)) if tasks[place][0] < ends[place - 1]
        ]
    return broken


@pytest.mark.parametrize(
    ("name", "form", "bubble", "period"),
    [
        ("1f1b", "v", 0, 4),
        ("chimera", "x", 0.2, 10),
        ("1f1b_plus", "m", 0.25, 8),
        ("1f1b_plus", "nn", 0.2, 10),
    ],
)
def test_bubbles_equal_table_2(name, form, bubble, period):
    schedule = schedule_blocks(name, shape_blocks(form, 4, train=True), 32)
    assert schedule.period == period
    assert schedule.steady_bubble_rate == pytest.approx(bubble)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
@pytest.mark.parametrize(
    ("name", "form"), [("gpipe", "k"), ("1f1b", "v"), ("1f1b_plus", "nn"), ("chimera", "x")]
)
def test_schedules_are_valid(name, form, micro_batches, devices, train):
    schedule = schedule_blocks(name, shape_blocks(form, devices, train), micro_batches)
    assert schedule.units == micro_batches
    assert not violations(schedule)
    assert schedule.lower_bound <= (
        schedule.makespan if schedule.repetend is None else schedule.period
    )


@pytest.mark.parametrize(("form", "bubble"), [("v", 0), ("m", 0), ("nn", 0)])
def test_inference_has_no_bubble(form, bubble):
    assert (
        schedule_blocks("1f1b_plus", shape_blocks(form, 4, train=False), 32).steady_bubble_rate
        == bubble
    )


def test_a_repetend_gives_the_starts_of_the_steady_state():
    schedule = schedule_blocks("1f1b_plus", shape_blocks("nn", 4, train=True), 40)
    repetend = schedule.repetend
    shifts = {
        starts[index]
        - repetend.starts[index]
        - schedule.period * (micro_batch - repetend.offsets[index])
        for micro_batch, starts in enumerate(schedule.starts)
        if 15 <= micro_batch < 25
        for index in range(len(starts))
    }
    assert len(shifts) == 1


def test_makespan_of_gpipe_equals_the_formula():
    # m + p - 1 slots of forwards, and the same number of slots of backwards.
    schedule = schedule_blocks("gpipe", shape_blocks("v", 4, train=True), 6)
    assert schedule.makespan == (6 + 3) * (1 + 3)
    assert schedule.peak_memory == (6, 6, 6, 6)
    assert schedule.period is None


def test_insufficient_memory_names_the_device_and_both_numbers():
    with pytest.raises(
        InfeasibleError,
        match=r"device 0: schedule 1f1b requires the memory 4, above the limit of 3",
    ):
        schedule_blocks("1f1b", shape_blocks("v", 4, train=True, memory=3), 8)


@pytest.mark.parametrize(
    ("name", "form", "reason"),
    [
        (
            "1f1b",
            "m",
            "'TPf0': schedule 1f1b requires blocks on one device each .use schedule 1f1b_plus",
        ),
        ("chimera", "m", "'TPf0': schedule chimera requires blocks on one device each"),
        ("1f1b", "x", "the blocks form 2"),
        ("1f1b_plus", "k", "starts a branch"),
        ("chimera", "v", "in opposite directions"),
    ],
)
def test_unsuitable_blocks_are_rejected(name, form, reason):
    with pytest.raises(InfeasibleError, match=reason):
        schedule_blocks(name, shape_blocks(form, 4, train=True), 8)


def test_a_chain_that_does_not_return_is_rejected():
    blocks = (Block("a", (0,), 1, 1), Block("b", (1,), 1, 0, (0,)), Block("c", (1,), 1, 0, (1,)))
    with pytest.raises(
        InfeasibleError,
        match=r"devices \[0, 1, 1\] are not visited once forward and once in reverse",
    ):
        schedule_blocks("1f1b", BlockGraph(2, blocks, (None, None)), 4)


def test_unknown_names_and_zero_micro_batches_are_rejected():
    assert block_schedule_names() == ("1f1b", "1f1b_plus", "chimera", "gpipe")
    with pytest.raises(ConfigurationError, match="zb_v"):
        schedule_blocks("zb_v", shape_blocks("v", 4, train=True), 4)
    with pytest.raises(ConfigurationError, match="micro-batches is 0, expected at least 1"):
        schedule_blocks("gpipe", shape_blocks("v", 4, train=True), 0)
