"""Start times of every block of all units, from a steady state or any order."""

from __future__ import annotations

from collections.abc import Iterable

from autopipe.ir.block_schedule import BlockGraph, BlockSchedule
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts

Starts = tuple[tuple[int, ...], ...]
"""`starts[n][i]`: start of block i of unit n."""


def unroll(graph: BlockGraph, cyclic: PeriodicStarts, units: int) -> Starts:
    """Units in the steady state's order on each device, each block as soon as this order and its own waits allow.

    Memory is as in the steady state or less: it depends on the order of starts alone.
    """
    return compact(
        graph, tuple(tuple(start + cyclic.period * unit for start in cyclic.starts) for unit in range(units))
    )


def compact(graph: BlockGraph, starts: Starts) -> Starts:
    """The same order of starts on each device, each block as early as it allows."""
    order = sorted((start, unit, index) for unit, each in enumerate(starts) for index, start in enumerate(each))
    return in_order(graph, len(starts), ((unit, index) for _, unit, index in order))


def in_order(graph: BlockGraph, units: int, order: Iterable[tuple[int, int]]) -> Starts:
    """Starts as early as possible for (unit, block) in an order in which each comes after all that it waits for."""
    blocks = graph.blocks
    free = [0] * graph.devices
    starts = [[0] * len(blocks) for _ in range(units)]
    for unit, index in order:
        block = blocks[index]
        start = max(free[device] for device in block.devices)
        for position, other in enumerate(block.after):
            start = max(start, starts[unit][other] + blocks[other].time + block.delay(position))
        starts[unit][index] = start
        for device in block.devices:
            free[device] = start + block.time
    return tuple(tuple(each) for each in starts)


def makespan(graph: BlockGraph, starts: Starts) -> int:
    """End of the last block."""
    return max(start + block.time for unit in starts for start, block in zip(unit, graph.blocks, strict=True))


def peaks(graph: BlockGraph, starts: Starts) -> tuple[int, ...]:
    """Most memory in use on each device."""
    return BlockSchedule(graph, starts).peak_memory


def fits(graph: BlockGraph, starts: Starts) -> bool:
    """True if memory suffices on all devices."""
    rooms = zip(peaks(graph, starts), graph.memory, strict=True)
    return all(room is None or peak <= room for peak, room in rooms)
