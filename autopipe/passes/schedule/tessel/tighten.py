"""The least period and the shortest way of a unit that an order of blocks allows."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.blocks import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import Cyclic

_Wait = tuple[int, int, int, int]
"""(before, after, time, periods): `after` starts no earlier than `before` does, plus time, less so many periods."""


def tighten(graph: BlockGraph, order: Cyclic, low: int) -> Cyclic:
    """The blocks in the order of `order`, at the least period of `low` or more that this order allows.

    Each block starts as early as it can, so that no other starts in this order and period make a unit's way shorter.
    Memory in use is that of `order`, whose times may be those of another graph.
    """
    waits = _waits(graph, order)
    high = max(low, order.period)
    while _earliest(len(graph.blocks), waits, high) is None:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if _earliest(len(graph.blocks), waits, middle) is None:
            low = middle + 1
        else:
            high = middle
    return Cyclic(high, _earliest(len(graph.blocks), waits, high) or order.starts)


def _waits(graph: BlockGraph, order: Cyclic) -> list[_Wait]:
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


def _earliest(count: int, waits: Sequence[_Wait], period: int) -> tuple[int, ...] | None:
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
