"""The whole schedule at once, without a steady state to begin from: what search by repetends is measured against."""

from __future__ import annotations

from autopipe.ir.block_schedule import BlockGraph, BlockSchedule, check_blocks
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.bounds import period_bound
from autopipe.passes.schedule.tessel.construct import construct
from autopipe.passes.schedule.tessel.memory import reserved
from autopipe.passes.schedule.tessel.options import Budget, SearchOptions
from autopipe.passes.schedule.tessel.serial import serial_order
from autopipe.passes.schedule.tessel.unroll import makespan, unroll
from autopipe.passes.schedule.tessel.whole import shortest


def search_whole(graph: BlockGraph, units: int, options: SearchOptions | None = None) -> BlockSchedule:
    """The schedule of least makespan, all units in one problem: the time-optimal search of Tessel's Figure 9.

    Begins from a steady state that is constructed without a solver. Raises ConfigurationError for blocks that make no
    sense, InfeasibleError where memory does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"{units} units; there must be at least one")
    budget = Budget(options or SearchOptions())
    roomy = reserved(graph, units)
    known = construct(roomy, period_bound(roomy), serial_order(graph, units, budget.limit(0.2)), budget)
    found = shortest(graph, unroll(graph, known, units), budget.limit(1.0), budget.report)
    optimal = makespan(graph, found.starts) == found.bound
    schedule = BlockSchedule(graph, found.starts, None, found.bound, optimal, None, budget.used)
    check_blocks(schedule)
    return schedule
