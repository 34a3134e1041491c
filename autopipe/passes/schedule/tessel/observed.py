"""The steady state that the starts of blocks show."""

from __future__ import annotations

from autopipe.ir.blocks import BlockGraph, BlockRepetend, BlockSchedule
from autopipe.passes.schedule.tessel.unroll import Starts


def observed_state(graph: BlockGraph, starts: Starts) -> BlockSchedule:
    """The schedule with the steady state that is found in its middle, if any.

    A steady state is there where so many units are followed by as many that do the same, all later by one
    distance. The period is its share a unit; a repetend is given where it holds one unit.
    """
    busiest = max(graph.loads)
    for group in range(1, len(starts) // 2 + 1):
        middle = (len(starts) - 2 * group + 1) // 2
        distance = starts[middle + group][0] - starts[middle][0]
        repeats = all(
            later - start == distance
            for unit in range(middle, middle + group)
            for start, later in zip(starts[unit], starts[unit + group], strict=True)
        )
        if not repeats or distance % group:
            continue
        period = distance // group
        if group > 1:
            return BlockSchedule(graph, starts, period, busiest * len(starts))
        return BlockSchedule(graph, starts, period, busiest, period == busiest, _repetend(starts[middle], period))
    return BlockSchedule(graph, starts, None, busiest * len(starts))


def _repetend(starts: tuple[int, ...], period: int) -> BlockRepetend:
    """One repetition: starts of a unit brought to within a period of the first one's start.

    A block that starts k periods after its unit's first one stands, beside that first one, for a unit k earlier.
    """
    first = min(starts)
    turns = [(start - first) // period for start in starts]
    offsets = tuple(max(turns) - turn for turn in turns)
    return BlockRepetend(tuple((start - first) % period for start in starts), offsets)
