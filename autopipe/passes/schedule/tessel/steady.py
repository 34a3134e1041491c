"""The steady state: least period first, then the shortest way of a unit, then least memory."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.blocks import BlockGraph
from autopipe.passes.schedule.tessel.bounds import period_bound
from autopipe.passes.schedule.tessel.coarse import coarse
from autopipe.passes.schedule.tessel.construct import construct
from autopipe.passes.schedule.tessel.cyclic import Cyclic
from autopipe.passes.schedule.tessel.options import Budget
from autopipe.passes.schedule.tessel.repetend import least_latency, least_memory, least_period, with_period
from autopipe.passes.schedule.tessel.serial import serial_order
from autopipe.passes.schedule.tessel.tighten import tighten
from autopipe.passes.solvers.cp_sat import Status


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady state, and what no period is less than."""

    cyclic: Cyclic
    bound: int


def steady_state(graph: BlockGraph, budget: Budget) -> Steady:
    """The best steady state found in the budget. Raises InfeasibleError where memory does not suffice for one unit."""
    serial = serial_order(graph, budget.limit(0.2))
    bound = period_bound(graph)
    budget.report(None, bound)
    best = construct(graph, bound, serial, budget)
    budget.report(best.period, bound)
    if best.period > bound:
        best = _rounded(graph, best, bound, budget)
    if best.period > bound:
        best, bound = _exact(graph, best, bound, budget)
    return Steady(_shorter(graph, best, budget), bound)


def _rounded(graph: BlockGraph, best: Cyclic, bound: int, budget: Budget) -> Cyclic:
    """A better steady state by way of rounded times, if there is one."""
    rounded = coarse(graph, bound)
    if rounded is None:
        return best
    low = period_bound(rounded)
    found = with_period(rounded, low, budget.limit(0.15))
    budget.spend(found.work)
    if found.cyclic is None:
        known = tighten(rounded, best, low)
        found = least_period(rounded, low, known, budget.limit(0.25))
        budget.spend(found.work)
    if found.cyclic is None:
        return best
    exact = tighten(graph, found.cyclic, bound)
    return min(best, exact, key=lambda each: each.period)


def _exact(graph: BlockGraph, best: Cyclic, bound: int, budget: Budget) -> tuple[Cyclic, int]:
    """The least period, or one closer to it, and a bound closer to it."""
    found = with_period(graph, bound, budget.limit(0.3))
    budget.spend(found.work)
    if found.cyclic is not None:
        return found.cyclic, bound
    if found.status is Status.INFEASIBLE:
        bound += 1
    if best.period == bound:
        return best, bound
    found = least_period(graph, bound, best, budget.limit(0.7), budget.report)
    budget.spend(found.work)
    if found.status is Status.INFEASIBLE:
        return best, best.period
    if found.cyclic is not None:
        best = tighten(graph, found.cyclic, bound)
    return best, min(best.period, max(bound, found.bound or 0))


def _shorter(graph: BlockGraph, best: Cyclic, budget: Budget) -> Cyclic:
    """The same period with a shorter way of a unit, and then with less memory."""
    best = tighten(graph, best, best.period)
    found = least_latency(graph, best, budget.limit(0.3))
    budget.spend(found.work)
    best = found.cyclic or best
    found = least_memory(graph, best, budget.limit(0.3), best.latency(graph))
    budget.spend(found.work)
    return found.cyclic or best
