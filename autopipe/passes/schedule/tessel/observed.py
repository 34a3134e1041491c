"""The steady state that the starts of blocks show."""

from __future__ import annotations

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule
from autopipe.passes.schedule.tessel.unroll import Starts


def observed_state(graph: BlockGraph, starts: Starts) -> BlockSchedule:
    """The schedule with the steady state that is found in its middle, if any.

    A steady state is there where, over the middle third, every block of a unit a fixed number of units further starts
    later by one distance. The period is its share a unit; a repetend is given where it holds one unit.
    """
    busiest, count = max(graph.loads), len(starts)
    first, last = count // 3, count - count // 3
    for group in range(1, (last - first) // 2 + 1):
        distance = turn_of(starts, group, first, last)
        if distance is None or distance % group:
            continue
        period = distance // group
        if group > 1:
            return BlockSchedule(graph, starts, period, busiest * count)
        return BlockSchedule(graph, starts, period, busiest, period == busiest, _repetend(starts[first], period))
    return BlockSchedule(graph, starts, None, busiest * count)


def turn_of(starts: Starts, group: int, first: int, last: int) -> int | None:
    """By how much later each unit from `first` on, up to `last`, is than the one `group` before; None if it varies."""
    distances = {
        later - start
        for unit in range(first, last - group)
        for start, later in zip(starts[unit], starts[unit + group], strict=True)
    }
    return distances.pop() if len(distances) == 1 else None


def _repetend(starts: tuple[int, ...], period: int) -> BlockRepetend:
    """One repetition: starts of a unit brought to within a period of the first one's start.

    A block that starts k periods after its unit's first one stands, beside that first one, for a unit k earlier.
    """
    first = min(starts)
    turns = [(start - first) // period for start in starts]
    offsets = tuple(max(turns) - turn for turn in turns)
    return BlockRepetend(tuple((start - first) % period for start in starts), offsets)
