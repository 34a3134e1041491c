"""Times in coarse steps, for solvers: an order of blocks that is good for rounded times is good for exact ones."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.block_schedule import BlockGraph

STEPS = 96
"""Steps of the least period to which times are rounded up. Few make small models, many keep the error small."""


def coarse(graph: BlockGraph, bound: int) -> BlockGraph | None:
    """The same blocks with times in steps of `bound` / STEPS, rounded up; None where times are no finer than that."""
    step = -(-bound // STEPS)
    if step < 4:
        return None
    blocks = (
        replace(each, time=-(-each.time // step), delays=tuple(-(-delay // step) for delay in each.delays))
        for each in graph.blocks
    )
    return replace(graph, blocks=tuple(blocks))
