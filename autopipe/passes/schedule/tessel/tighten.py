"""The least period and the shortest way of a unit that an order of blocks allows."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts

_Wait = tuple[int, int, int, int]
"""(before, after, time, periods): `after` starts no earlier than `before` plus time, less that many periods."""


def tighten(graph: BlockGraph, order: PeriodicStarts, low: int) -> PeriodicStarts:
    """The blocks in the order of `order`, at the least period of `low` or more that this order allows.

    Each block starts as early as it can, so that no other starts in this order and period make a unit's way shorter.
    Memory in use is that of `order`, whose times may be those of another graph. The period is raised to what the
    slowest circle of waits needs until there is none left that takes longer than its periods.
    """
    waits, period = _waits(graph, order), low
    while True:
        starts, circle = _earliest(len(graph.blocks), waits, period)
        if circle is None:
            return PeriodicStarts(period, starts)
        time = sum(wait[2] for wait in circle)
        periods = sum(wait[3] for wait in circle)
        period = -(-time // periods)


def _waits(graph: BlockGraph, order: PeriodicStarts) -> list[_Wait]:
    waits: list[_Wait] = []
    for index, block in enumerate(graph.blocks):
        for position, other in enumerate(block.after):
            waits.append((other, index, graph.blocks[other].time + block.delay(position), 0))
    stages, phases = order.stages, order.phases
    for device in range(graph.devices):
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        members.sort(key=lambda index: phases[index])
        for before, after in zip(members, [*members[1:], *members[:1]], strict=True):
            wraps = after == members[0]
            waits.append((before, after, graph.blocks[before].time, stages[before] - stages[after] + wraps))
    return list(dict.fromkeys(waits))


def _earliest(count: int, waits: Sequence[_Wait], period: int) -> tuple[tuple[int, ...], list[_Wait] | None]:
    """Least starts of 0 or more that keep all waits, or a circle of waits that takes longer than its periods."""
    starts = [0] * count
    last: list[_Wait | None] = [None] * count
    while True:
        changed = False
        for wait in waits:
            before, after, time, periods = wait
            start = starts[before] + time - periods * period
            if start > starts[after]:
                starts[after], last[after], changed = start, wait, True
        if not changed:
            return tuple(starts), None
        circle = _circle(last)
        if circle is not None:
            return (), circle


def _circle(last: Sequence[_Wait | None]) -> list[_Wait] | None:
    """A circle among the waits that each block was last put off by."""
    seen = [-1] * len(last)
    for begin in range(len(last)):
        at = begin
        while seen[at] < 0 and (wait := last[at]) is not None:
            seen[at] = begin
            at = wait[0]
        if seen[at] == begin and last[at] is not None:
            circle, stop = [], at
            while True:
                wait = last[at]
                assert wait is not None, "a circle has no end"
                circle.append(wait)
                at = wait[0]
                if at == stop:
                    return circle
    return None
