"""Schedules of blocks as pictures: what a block's name says, and memory that counts from its
start.
"""

from __future__ import annotations

from autopipe.api.timeline_figure import block_kinds, block_picture
from autopipe.ir.block_schedule import Block
from autopipe.ir.schedule import Phase
from autopipe.passes.schedule.published.blocks import SHAPES, shape_blocks
from tests.cli.drawing.examples import split_embedding


def test_names_tell_stages_and_phases():
    names = ("F0", "TPf1", "B0", "I0", "W0", "TPb1", "Bob", "loss")
    kinds = block_kinds(tuple(Block(name, (0,), 1, -1 if name == "loss" else 1) for name in names))
    assert [stage for stage, _, _ in kinds] == [0, 1, 0, 0, 0, 1, 2, 3]
    phases = [phase for _, phase, _ in kinds]
    assert phases[2:5] == [Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT]
    assert [letter for _, _, letter in kinds] == ["F", "f", "B", "I", "W", "b", "F", "B"]
    assert phases[5:] == [Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD]


def test_every_shape_has_one_colour_for_a_forward_and_its_backward():
    for name in SHAPES:
        kinds = block_kinds(shape_blocks(name, 4, train=True).blocks)
        phases = {
            stage: {phase for other, phase, _ in kinds if other == stage} for stage, _, _ in kinds
        }
        assert all(each == {Phase.FORWARD, Phase.BACKWARD} for each in phases.values())


def test_memory_curves_reach_the_peaks_of_the_schedule():
    schedule = split_embedding()
    picture = block_picture(schedule, "")
    assert picture.peaks == schedule.peak_memory == (3, 1)
    assert [curve[-1][1] for curve in picture.memory] == [0, 0]
    assert all(
        sorted({time for time, _ in curve}) == [time for time, _ in curve]
        for curve in picture.memory
    )
