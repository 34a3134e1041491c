"""Searches that Tessel is measured against: all units at once (its Figure 9), and few units in flight (Figure 11)."""

from __future__ import annotations

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule, check_blocks
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.model import (
    Budget,
    SearchOptions,
    frees_all,
    makespan,
    period_bound,
    reserved,
    unroll,
)
from autopipe.passes.schedule.tessel.periodic import SteadyState, construct, least_period, one_at_a_time, with_period
from autopipe.passes.schedule.tessel.search import shortest
from autopipe.passes.schedule.tessel.warmup_cooldown import serial_order
from autopipe.passes.solvers.cp_sat import Status


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
    starts, bound, _ = shortest(graph, unroll(graph, known, units), budget.limit(1.0), budget.report)
    optimal = makespan(graph, starts) == bound
    schedule = BlockSchedule(graph, starts, None, bound, optimal, None, budget.used)
    check_blocks(schedule)
    return schedule


def search_in_flight(
    graph: BlockGraph, units: int, in_flight: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """The schedule whose repetend has blocks of at most `in_flight` units and the least period of all such.

    This is N_R of Lin et al., "Tessel" (HPCA 2024), Algorithm 1 and Figure 11: each device may begin its repetition at
    a time of its own. `optimal` and `lower_bound` are said of such repetends alone. The ends are as early as the order
    of blocks allows. Raises ConfigurationError for blocks that make no sense, InfeasibleError where memory does not
    suffice.
    """
    graph.verify()
    if units < 1 or in_flight < 1:
        raise ConfigurationError(f"{units} units, {in_flight} of them in flight; there must be at least one")
    budget, roomy = Budget(options or SearchOptions()), reserved(graph, units)
    known = one_at_a_time(graph, serial_order(graph, units, budget.limit(0.2)))
    bound = period_bound(roomy)
    best = SteadyState(Status.FEASIBLE, known, None, 0.0, (0,) * len(graph.blocks))
    if known.period > bound:
        found = with_period(roomy, bound, budget.limit(0.4), in_flight)
        budget.work += found.work
        if found.cyclic is None:
            found = least_period(roomy, bound, known, budget.limit(1.0), budget.report, in_flight)
            if frees_all(graph):
                bound = known.period if found.status is Status.INFEASIBLE else max(bound, found.bound or 0)
        best = found if found.cyclic is not None else best
    cyclic = best.cyclic or known
    phases = tuple(start - cyclic.period * stage for start, stage in zip(cyclic.starts, best.stages, strict=True))
    repetend = BlockRepetend(
        tuple(phase - min(phases) for phase in phases), tuple(max(best.stages) - stage for stage in best.stages)
    )
    starts, least = unroll(graph, cyclic, units), cyclic.period == bound
    schedule = BlockSchedule(graph, starts, cyclic.period, bound, least, repetend, budget.used)
    check_blocks(schedule)
    return schedule
