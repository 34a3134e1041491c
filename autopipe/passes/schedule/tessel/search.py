"""Schedule search: the steady state of least period, its ends, and all units at once where they are few.

Lin et al., "Tessel" (HPCA 2024), sections IV and V, with the repetend as a modulo schedule instead of one problem for
each assignment of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule, check_blocks
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.bounds import makespan_bound
from autopipe.passes.schedule.tessel.construct import one_at_a_time
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts
from autopipe.passes.schedule.tessel.ends import complete
from autopipe.passes.schedule.tessel.greedy import shortest_greedy
from autopipe.passes.schedule.tessel.observed import observed_state, turn_of
from autopipe.passes.schedule.tessel.options import Budget, SearchOptions
from autopipe.passes.schedule.tessel.serial import serial_order
from autopipe.passes.schedule.tessel.steady import steady_state
from autopipe.passes.schedule.tessel.unroll import Starts, fits, makespan, unroll
from autopipe.passes.schedule.tessel.whole import shortest

_FEW_BLOCKS = 64
"""Blocks of all units together that are always solved at once as well."""
_MOST_BLOCKS = 400
"""Most blocks that are solved at once."""
_MOST_UNROLLED = 2000
"""Most blocks of a schedule that need not repeat: programs write them out."""
_SETTLED_AFTER = 2
"""Units a device after which others do, a few units together."""
_MOST_TOGETHER = 4
_WORTH = 0.02
"""Share of the makespan that a schedule without a repetend of one unit must save."""

__all__ = ["SearchOptions", "search"]


def search(graph: BlockGraph, units: int, options: SearchOptions | None = None) -> BlockSchedule:
    """The best schedule found for `units` units: least period, then shortest warm-up and cool-down, then least memory.

    Raises ConfigurationError for blocks that make no sense, InfeasibleError where memory does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"{units} units; there must be at least one")
    budget = Budget(options or SearchOptions())
    steady = steady_state(graph, units, budget)
    cyclic = steady.cyclic
    starts = complete(graph, cyclic, units, budget)
    if not fits(graph, starts):
        # Units that free before they allocate can lean on the next ones in the steady state; the last one cannot.
        cyclic = one_at_a_time(graph, serial_order(graph, units, budget.limit(1.0)))
        starts = unroll(graph, cyclic, units)
    proven = cyclic.period == steady.bound
    schedule = BlockSchedule(graph, starts, cyclic.period, steady.bound, proven, _repetend(cyclic))
    schedule = _shortened(schedule, cyclic, budget)
    check_blocks(schedule)
    return replace(schedule, search_time_s=budget.used)


def _shortened(schedule: BlockSchedule, cyclic: PeriodicStarts, budget: Budget) -> BlockSchedule:
    """A shorter schedule that repeats later or not at all, where there is one and few enough units do not repeat."""
    graph, units = schedule.graph, schedule.units
    bound, few = makespan_bound(graph, units), _few(graph, cyclic, units)
    early, all_early = _written_out(graph, units, budget.options.unrolled)
    single = all(len(block.devices) == 1 for block in graph.blocks)  # Lists leave the devices of wide blocks waiting.
    if schedule.makespan > bound and not budget.over and early and single:
        schedule = _list_schedule(schedule, few or all_early, early) or schedule
    if schedule.makespan > bound and not budget.over and few:
        schedule = _all_at_once(schedule, budget)
    return schedule


def _written_out(graph: BlockGraph, units: int, unrolled: int | None) -> tuple[int, bool]:
    """Units that programs may write out before a steady state, and whether they may write out all that there are."""
    early = _SETTLED_AFTER * graph.devices
    if unrolled is None:
        return early, units * len(graph.blocks) <= _MOST_UNROLLED
    counts = Counter(device for block in graph.blocks for device in block.devices)
    most = unrolled // max(counts.values())
    return min(early, most), units <= most


def _list_schedule(known: BlockSchedule, few: bool, early: int) -> BlockSchedule | None:
    """The list schedule of the same units, where it is shorter and comes to the same period, or need not repeat."""
    graph, bound = known.graph, makespan_bound(known.graph, known.units)
    starts = shortest_greedy(graph, known.units)
    if starts is None or makespan(graph, starts) >= known.makespan:
        return None
    seen = observed_state(graph, starts)
    if seen.repetend is not None and seen.period == known.period and (few or _settles(starts, early, 1)):
        return replace(known, starts=starts, repetend=seen.repetend)
    together = range(2, _MOST_TOGETHER + 1)
    repeats = seen.period == known.period and any(_settles(starts, early, group) for group in together)
    if not (few or repeats) or seen.makespan > (1 - _WORTH) * known.makespan:
        return None
    return BlockSchedule(graph, starts, seen.period, bound, seen.makespan == bound)


def _settles(starts: Starts, early: int, group: int) -> bool:
    """True if a steady state of `group` units together begins after `early` units."""
    middle = len(starts) // 2
    return early + group < middle and turn_of(starts, group, early, middle) is not None


def _few(graph: BlockGraph, cyclic: PeriodicStarts, units: int) -> bool:
    """True if so few units repeat that all of them at once may do better, and so few blocks that they can be solved."""
    count = units * len(graph.blocks)
    return count <= _FEW_BLOCKS or (count <= _MOST_BLOCKS and units <= 2 * max(cyclic.stages) + 2)


def _all_at_once(schedule: BlockSchedule, budget: Budget) -> BlockSchedule:
    """The shortest schedule of all units, where that is shorter than the steady state with its ends."""
    graph = schedule.graph
    whole = shortest(graph, schedule.starts, budget.limit(0.8))
    budget.spend(whole.work)
    length = makespan(graph, whole.starts)
    if length >= schedule.makespan:
        return schedule
    return BlockSchedule(graph, whole.starts, None, whole.bound, length == whole.bound)


def _repetend(cyclic: PeriodicStarts) -> BlockRepetend:
    """Each block's start within the period, and its unit in that repetition."""
    last = max(cyclic.stages)
    return BlockRepetend(cyclic.phases, tuple(last - stage for stage in cyclic.stages))
