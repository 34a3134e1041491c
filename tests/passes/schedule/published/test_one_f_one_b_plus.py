"""1F1B+ has equal orders on stages and on blocks. Table II of the Tessel paper is measured on
blocks.
"""

from __future__ import annotations

import pytest

from autopipe.ir.schedule import StageGraph
from autopipe.passes.schedule.published.blocks import schedule_blocks, shape_blocks
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackwardPlus


def stages_of(form, devices):
    """Return the stages of a shape's forwards as a chain, and their names."""
    blocks = list(shape_blocks(form, devices, train=False).blocks)
    edges = tuple((stage, stage + 1) for stage in range(len(blocks) - 1))
    return StageGraph(devices, tuple(block.devices for block in blocks), edges), [
        block.name for block in blocks
    ]


@pytest.mark.parametrize("form", ["v", "m", "nn"])
@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 3, 11])
def test_the_order_equals_that_of_blocks(form, devices, micro_batches):
    graph, names = stages_of(form, devices)
    schedule = OneForwardOneBackwardPlus().order(graph, micro_batches)
    schedule.verify(graph, train=True)
    other = schedule_blocks("1f1b_plus", shape_blocks(form, devices, train=True), micro_batches)
    letters = [block.name.replace("TPf", "F*").replace("TPb", "B*") for block in other.graph.blocks]
    expected = [[(letters[block], unit) for _, unit, block in tasks] for tasks in other.tasks]
    found = [
        [
            (
                task.phase.value + names[task.stage].replace("TPf", "*").replace("F", ""),
                task.micro_batch,
            )
            for task in order
        ]
        for order in schedule.tasks
    ]
    assert found == expected


def test_a_shared_stage_at_the_end_follows_the_last_stage():
    graph = StageGraph(2, ((0,), (1,), (0, 1)), ((0, 1), (1, 2)))
    schedule = OneForwardOneBackwardPlus().order(graph, 3)
    schedule.verify(graph, train=True)
    assert schedule.grid().splitlines() == [
        "0: 0F0 2F0 2B0 0F1 0B0 2F1 2B1 0F2 0B1 2F2 2B2 0B2",
        "1: 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1F2 2F2 2B2 1B2",
    ]
