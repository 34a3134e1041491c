"""Graphs of blocks: what is refused, and in which order they can run."""

from __future__ import annotations

import pytest

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import ConfigurationError

F = Block("F", (0,), 1, 1)
B = Block("B", (0,), 3, -1, (0,))

REFUSED = {
    "no blocks": (BlockGraph(1, (), (None,)), "no blocks"),
    "memory of another cluster": (
        BlockGraph(1, (F,), (None, 1)),
        "memory limits is 2, expected one for each of 1 device",
    ),
    "no device": (BlockGraph(1, (Block("F", (), 1),), (None,)), "'F': the block is on no device"),
    "a device twice": (BlockGraph(1, (Block("F", (0, 0), 1),), (None,)), "lists a device twice"),
    "out of range": (
        BlockGraph(1, (Block("F", (1,), 1),), (None,)),
        "'F': the block is on device 1",
    ),
    "no time": (BlockGraph(1, (Block("F", (0,), 0),), (None,)), "the time of the block is 0"),
    "negative time": (
        BlockGraph(1, (Block("F", (0,), -2),), (None,)),
        "the time of the block is -2",
    ),
    "after nothing": (
        BlockGraph(1, (Block("F", (0,), 1, 0, (1,)),), (None,)),
        "depends on a block that does not exist",
    ),
    "a negative delay": (
        BlockGraph(1, (F, Block("B", (0,), 1, 0, (0,), (-1,))), (None,)),
        "delay of 0 or more",
    ),
    "too few delays": (
        BlockGraph(1, (F, B, Block("C", (0,), 1, 0, (0, 1), (2,))), (None,)),
        "delay of 0 or more",
    ),
    "a circle": (
        BlockGraph(1, (F, Block("A", (0,), 1, 0, (0, 2)), Block("B", (0,), 1, 0, (1,))), (None,)),
        "wait in a circle: 'A' after 'B' after 'A'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_blocks_that_cannot_run_are_refused(case):
    graph, expected = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        graph.verify()
    assert expected in str(caught.value)


def test_every_block_stands_after_what_it_waits_for():
    blocks = (Block("C", (0,), 1, 0, (1, 2)), Block("A", (0,), 2), Block("B", (0,), 3, 0, (1, 1)))
    graph = BlockGraph(1, blocks, (None,))
    graph.verify()
    assert graph.order == (1, 2, 0)
    assert graph.loads == (6,)
