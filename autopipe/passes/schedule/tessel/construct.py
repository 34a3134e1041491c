"""Steady states without a solver: an answer always, and a place to begin from.

The blocks of one unit are put one after the other into the earliest gap of the period, without taking any back; a
longer period always leads to an answer. A simple form of Rau, "Iterative modulo scheduling" (MICRO 1994).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.blocks import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import Cyclic, is_valid
from autopipe.passes.schedule.tessel.tighten import tighten

_STEP = 1.1
"""Factor from one period that is tried to the next."""


def construct(graph: BlockGraph, low: int, serial: Sequence[int]) -> Cyclic:
    """A steady state of a period of `low` or more. `serial` is an order of one unit's blocks that fits memory."""
    best = one_at_a_time(graph, serial)
    period: float = low
    while period < best.period:
        found = _place(graph, serial, round(period))
        if found is not None and is_valid(graph, found):
            best = found
        period *= _STEP
    return tighten(graph, best, low)


def one_at_a_time(graph: BlockGraph, serial: Sequence[int]) -> Cyclic:
    """One block at a time on all devices together, and each unit after the one before."""
    starts, now = [0] * len(graph.blocks), 0
    for index in serial:
        starts[index] = max(now, _ready(graph, starts, index))
        now = starts[index] + graph.blocks[index].time
    return Cyclic(now, tuple(starts))


def _ready(graph: BlockGraph, starts: Sequence[int], index: int) -> int:
    """When all that a block waits for is there."""
    block = graph.blocks[index]
    ends = (starts[other] + graph.blocks[other].time + block.delay(at) for at, other in enumerate(block.after))
    return max(ends, default=0)


def _place(graph: BlockGraph, serial: Sequence[int], period: int) -> Cyclic | None:
    """Each block in turn in the first gap of the period that holds it on all its devices."""
    starts = [0] * len(graph.blocks)
    placed: list[set[int]] = [set() for _ in range(graph.devices)]
    for index in serial:
        devices = graph.blocks[index].devices
        neighbours = set().union(*(placed[device] for device in devices))
        start = _first_gap(graph, starts, neighbours, index, period)
        if start is None:
            return None
        starts[index] = start
        for device in devices:
            placed[device].add(index)
    return Cyclic(period, tuple(starts))


def _first_gap(graph: BlockGraph, starts: Sequence[int], neighbours: set[int], index: int, period: int) -> int | None:
    """The first start of a block, ready or later, at which it overlaps none of its neighbours in any period."""
    time, ready = graph.blocks[index].time, _ready(graph, starts, index)
    if time > period:
        return None
    ends = ((starts[other] + graph.blocks[other].time - ready) % period for other in neighbours)
    for wait in sorted({0, *ends}):
        gaps = ((other, (starts[other] - ready - wait) % period) for other in neighbours)
        if all(gap >= time and period - gap >= graph.blocks[other].time for other, gap in gaps):
            return ready + wait
    return None
