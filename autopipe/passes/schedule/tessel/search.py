"""Schedule search: the steady state of least period, its ends, and all units at once where they are few.

Lin et al., "Tessel" (HPCA 2024), sections IV and V, with the repetend as a modulo schedule instead of one problem for
each assignment of micro-batches.
"""

from __future__ import annotations

from autopipe.ir.block_check import check_blocks
from autopipe.ir.blocks import BlockGraph, BlockRepetend, BlockSchedule
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.bounds import makespan_bound, period_bound
from autopipe.passes.schedule.tessel.construct import construct, tighten
from autopipe.passes.schedule.tessel.cyclic import Cyclic
from autopipe.passes.schedule.tessel.options import Budget, SearchOptions
from autopipe.passes.schedule.tessel.repetend import least_latency, least_period, with_period
from autopipe.passes.schedule.tessel.room import serial_order
from autopipe.passes.schedule.tessel.unroll import makespan, unroll
from autopipe.passes.schedule.tessel.whole import shortest
from autopipe.passes.solvers.cp_sat import Status

__all__ = ["SearchOptions", "search"]


def search(graph: BlockGraph, units: int, options: SearchOptions | None = None) -> BlockSchedule:
    """The best schedule found for so many units: least period, then shortest ends, then least memory.

    Raises ConfigurationError for blocks that make no sense, InfeasibleError where memory does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"{units} units; there must be at least one")
    budget = Budget(options or SearchOptions())
    cyclic, bound = _steady(graph, budget)
    starts = unroll(graph, cyclic, units)
    schedule = BlockSchedule(
        graph, starts, cyclic.period, bound, cyclic.period == bound, _repetend(cyclic), budget.used
    )
    few = units * len(graph.blocks) <= budget.options.whole_limit
    if few and makespan(graph, starts) > makespan_bound(graph, units):
        schedule = _all_at_once(schedule, budget)
    check_blocks(schedule)
    return schedule


def _steady(graph: BlockGraph, budget: Budget) -> tuple[Cyclic, int]:
    """The steady state, and what no period is less than."""
    serial = serial_order(graph, budget.limit(0.2))
    bound = period_bound(graph)
    best = construct(graph, bound, serial)
    if best.period > bound:
        at_bound = with_period(graph, bound, budget.limit(0.4))
        budget.work += at_bound.work
        if at_bound.cyclic is not None:
            best = at_bound.cyclic
        elif at_bound.status is Status.INFEASIBLE:
            bound += 1
    if best.period > bound:
        shorter = least_period(graph, bound, best, budget.limit(0.6))
        budget.work += shorter.work
        if shorter.cyclic is not None:
            best = tighten(graph, shorter.cyclic, bound)
        bound = best.period if shorter.status is Status.INFEASIBLE else max(bound, shorter.bound or 0)
    shortest_way = least_latency(graph, best, budget.limit(0.5))
    budget.work += shortest_way.work
    return shortest_way.cyclic or best, min(bound, best.period)


def _all_at_once(schedule: BlockSchedule, budget: Budget) -> BlockSchedule:
    """The shortest schedule of all units, where that is shorter than the steady state with its ends."""
    graph = schedule.graph
    whole = shortest(graph, schedule.starts, budget.limit(0.9))
    budget.work += whole.work
    length = makespan(graph, whole.starts)
    if length >= schedule.makespan:
        return schedule
    return BlockSchedule(graph, whole.starts, None, whole.bound, length == whole.bound, None, budget.used)


def _repetend(cyclic: Cyclic) -> BlockRepetend:
    stages = cyclic.stages
    phases = tuple(start % cyclic.period for start in cyclic.starts)
    return BlockRepetend(phases, tuple(max(stages) - stage for stage in stages))
