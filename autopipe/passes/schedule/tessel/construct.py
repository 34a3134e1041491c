"""Cyclic schedules without a solver: an answer always, and a place to begin from.

Blocks of one unit are put one after the other into the earliest gap of the period, as in Rau, "Iterative modulo
scheduling" (1994), without taking any back; a longer period always leads to an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopipe.ir.blocks import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import Cyclic, is_valid

_STEP = 1.125
"""Factor from one period that is tried to the next."""


def construct(graph: BlockGraph, low: int, serial: Sequence[int]) -> Cyclic:
    """A cyclic schedule of a period of `low` or more, kept short. `serial` is an order of one unit that fits memory."""
    best = _one_at_a_time(graph, serial)
    period: float = low
    while period < best.period:
        found = _place(graph, serial, round(period))
        if found is not None and is_valid(graph, found):
            best = found
        period *= _STEP
    return tighten(graph, best, low)


def _one_at_a_time(graph: BlockGraph, serial: Sequence[int]) -> Cyclic:
    """Each unit after the one before, one block at a time."""
    starts, now = [0] * len(graph.blocks), 0
    for index in serial:
        block = graph.blocks[index]
        ends = [starts[other] + graph.blocks[other].time + block.delay(at) for at, other in enumerate(block.after)]
        starts[index] = max([now, *ends])
        now = starts[index] + block.time
    return Cyclic(now, tuple(starts))


def _place(graph: BlockGraph, serial: Sequence[int], period: int) -> Cyclic | None:
    """Each block in turn in the first gap of the period that holds it on all its devices."""
    starts = [0] * len(graph.blocks)
    placed: list[list[int]] = [[] for _ in range(graph.devices)]
    for index in serial:
        block = graph.blocks[index]
        if block.time > period:
            return None
        ready = 0
        for position, other in enumerate(block.after):
            ready = max(ready, starts[other] + graph.blocks[other].time + block.delay(position))
        neighbours = {other for device in block.devices for other in placed[device]}
        start = _first_gap(graph, starts, neighbours, index, ready, period)
        if start is None:
            return None
        starts[index] = start
        for device in block.devices:
            placed[device].append(index)
    return Cyclic(period, tuple(starts))


def _first_gap(
    graph: BlockGraph, starts: Sequence[int], neighbours: set[int], index: int, ready: int, period: int
) -> int | None:
    time = graph.blocks[index].time
    ends = ((starts[other] + graph.blocks[other].time - ready) % period for other in neighbours)
    for wait in sorted({0, *ends}):
        start = ready + wait
        gaps = ((other, (starts[other] - start) % period) for other in neighbours)
        if all(gap >= time and period - gap >= graph.blocks[other].time for other, gap in gaps):
            return start
    return None


def tighten(graph: BlockGraph, cyclic: Cyclic, low: int) -> Cyclic:
    """The same order of blocks at the least period of `low` or more that it allows, each block as early as it can."""
    waits = _waits(graph, cyclic)
    best, high = cyclic, cyclic.period
    while low < high:
        middle = (low + high) // 2
        starts = _earliest(len(graph.blocks), waits, middle)
        if starts is None:
            low = middle + 1
        else:
            best, high = Cyclic(middle, starts), middle
    return best


def _waits(graph: BlockGraph, cyclic: Cyclic) -> list[tuple[int, int, int, int]]:
    """(before, after, time, periods): start of `after` >= start of `before` + time - periods x period."""
    found = []
    for index, block in enumerate(graph.blocks):
        for position, other in enumerate(block.after):
            found.append((other, index, graph.blocks[other].time + block.delay(position), 0))
    stage = [start // cyclic.period for start in cyclic.starts]
    for device in range(graph.devices):
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        members.sort(key=lambda index: cyclic.starts[index] % cyclic.period)
        for before, after in pairwise(members):
            found.append((before, after, graph.blocks[before].time, stage[before] - stage[after]))
        if members:
            last, first = members[-1], members[0]
            found.append((last, first, graph.blocks[last].time, stage[last] + 1 - stage[first]))
    return found


def _earliest(count: int, waits: Sequence[tuple[int, int, int, int]], period: int) -> tuple[int, ...] | None:
    """Least starts of 0 or more that keep all waits; None where a circle of them takes longer than its periods."""
    starts = [0] * count
    for _ in range(count + 1):
        changed = False
        for before, after, time, periods in waits:
            start = starts[before] + time - periods * period
            if start > starts[after]:
                starts[after], changed = start, True
        if not changed:
            return tuple(starts)
    return None
