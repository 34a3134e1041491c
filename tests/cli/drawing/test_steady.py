"""Where the repetend of a picture begins and ends."""

from __future__ import annotations

import dataclasses

from autopipe.api.timeline_figure import block_picture, plan_picture, steady_state
from autopipe.passes.schedule.published.blocks import schedule_blocks, shape_blocks
from tests.cli.drawing.examples import chain_plan, own_sizes_plan, split_embedding


def test_devices_move_on_at_one_pace():
    plan, timeline = chain_plan(micro_batches=64)
    state = steady_state(plan.schedule, timeline)
    assert state is not None
    # A forward of 1 s and a backward of 2 s; each of the 64 micro-batches but those of the ends.
    assert (state.period, state.end - state.start, state.count) == (3.0, 180.0, 60)
    for device in range(4):
        starts = [
            s.start
            for s in timeline.spans
            if s.device == device and state.start <= s.start < state.end
        ]
        assert len(starts) == 2 * state.count


def test_a_short_step_has_the_part_in_which_all_devices_are_in_their_repetends():
    plan, timeline = chain_plan(micro_batches=6)
    state = steady_state(plan.schedule, timeline)
    # Stage 0 begins to repeat last, with its fourth forward; it ends first, with its third
    # backward.
    assert state is not None
    assert (state.start, state.end, state.count, state.period) == (3.0, 18.0, 3, None)


def test_a_schedule_of_blocks_repeats_as_its_repetend_says():
    schedule = split_embedding(units=8)
    state = block_picture(schedule, "").steady
    assert state is not None
    # The first whole repetition holds the last blocks of unit 0 and the first ones of unit 2, from
    # 12 on.
    assert (state.start, state.period, state.count) == (12, 6, 6)
    for task in (
        (start, index) for start, _, index in schedule.tasks[0] if state.start <= start < state.end
    ):
        assert task[1] in range(6)
    assert block_picture(split_embedding(units=2), "").steady is None


def test_repetitions_that_start_earlier_than_the_repetend_says_are_no_part_of_it():
    schedule = split_embedding(units=8)

    def steady_with_early_start_of(unit):
        starts = [*schedule.starts]
        starts[unit] = (starts[unit][0] - 1, *starts[unit][1:])
        return block_picture(dataclasses.replace(schedule, starts=tuple(starts)), "").steady

    # Repetition r, from 12 + 6 r on, holds the first block of unit r + 2 and the last one of unit
    # r.
    warm_up = steady_with_early_start_of(1)
    second = steady_with_early_start_of(3)
    assert warm_up is not None and second is not None
    assert (warm_up.start, warm_up.count) == (12, 6)
    assert (second.start, second.count) == (24, 4)


def test_a_published_schedule_repeats_only_once_its_pipeline_is_full():
    schedule = schedule_blocks("1f1b", shape_blocks("v", 8, train=True), 32)
    state = block_picture(schedule, "").steady
    assert state is not None
    for device in range(8):
        inside = [
            start for start, _, _ in schedule.tasks[device] if state.start <= start < state.end
        ]
        assert len(inside) == 2 * state.count


def test_stages_with_smaller_micro_batches_move_on_at_the_same_pace():
    plan, timeline = own_sizes_plan((1, 2, 4), micro_batches=16)
    state = plan_picture(plan, timeline).steady
    assert state is not None
    # A sample takes 1 s forward and 2 s backward on each device: 12 s for one of the largest
    # micro-batches.
    assert state.period == 12.0
    assert state.count >= 10
    assert (
        steady_state(plan.schedule, timeline) is None
        or steady_state(plan.schedule, timeline).period is None
    )
