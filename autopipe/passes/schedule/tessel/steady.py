"""The steady state: least period first, then the shortest way of a unit, then least memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.bounds import period_bound
from autopipe.passes.schedule.tessel.coarse import coarse
from autopipe.passes.schedule.tessel.construct import construct
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts
from autopipe.passes.schedule.tessel.memory import frees_all, reserved
from autopipe.passes.schedule.tessel.options import Budget
from autopipe.passes.schedule.tessel.repetend import Repetend, least_latency, least_memory, least_period, with_period
from autopipe.passes.schedule.tessel.serial import serial_order
from autopipe.passes.schedule.tessel.tighten import tighten
from autopipe.passes.solvers.cp_sat import Limit, Status

_PAIRS_PER_SECOND = 4000
"""Pairs of blocks on one device, for each second of the time limit, of which models are made: a tenth of a second's."""


@dataclass(frozen=True, slots=True)
class PeriodicResult:
    """A steady state, and what no period is less than."""

    cyclic: PeriodicStarts
    bound: int


def steady_state(graph: BlockGraph, units: int, budget: Budget) -> PeriodicResult:
    """The best steady state found in the budget, for `units` units.

    Raises InfeasibleError where memory does not suffice for them even one after the other.
    """
    found = least_steady_period(graph, units, budget)
    budget.report(found.cyclic.period, found.bound)
    best = _shorter(reserved(graph, units), found.cyclic, budget)
    budget.report(best.period, found.bound)
    return PeriodicResult(best, found.bound)


def least_steady_period(graph: BlockGraph, units: int, budget: Budget) -> PeriodicResult:
    """A steady state of the least period found, whatever its way and memory. Raises as `steady_state` does."""
    serial = serial_order(graph, units, budget.limit(0.2))
    graph = reserved(graph, units)
    bound = period_bound(graph)
    budget.report(None, bound)
    best = construct(graph, bound, serial, budget)
    budget.report(best.period, bound)
    if best.period > bound:
        best = _rounded(graph, best, bound, budget)
    if best.period > bound:
        best, proven = _exact(graph, best, bound, budget)
        bound = proven if frees_all(graph) else bound  # Other units may need less than `changes` say.
    return PeriodicResult(best, bound)


def _rounded(graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget) -> PeriodicStarts:
    """A better steady state by way of rounded times, if there is one."""
    rounded = coarse(graph, bound)
    if rounded is None:
        return best
    low = period_bound(rounded)
    found = _ask(graph, budget, 0.1, lambda limit: with_period(rounded, low, limit))
    if found.cyclic is None:
        known = tighten(rounded, best, low)
        found = _ask(graph, budget, 0.35, lambda limit: least_period(rounded, low, known, limit))
    if found.cyclic is None:
        return best
    return min(best, tighten(graph, found.cyclic, bound), key=lambda each: each.period)


def _exact(graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget) -> tuple[PeriodicStarts, int]:
    """The least period, or one closer to it, and a bound closer to it."""
    found = _ask(graph, budget, 0.15, lambda limit: with_period(graph, bound, limit))
    if found.cyclic is not None:
        return found.cyclic, bound
    low = bound + 1 if found.status is Status.INFEASIBLE else bound
    if best.period == low:
        return best, low
    found = _ask(graph, budget, 0.6, lambda limit: least_period(graph, low, best, limit, budget.report))
    if found.status is Status.INFEASIBLE:
        return best, best.period
    if found.cyclic is not None:
        best = tighten(graph, found.cyclic, low)
    return best, min(best.period, max(low, found.bound or 0))


def _shorter(graph: BlockGraph, best: PeriodicStarts, budget: Budget) -> PeriodicStarts:
    """The same period with a shorter way of a unit, and then with less memory."""
    best = tighten(graph, best, best.period)
    best = _ask(graph, budget, 0.2, lambda limit: least_latency(graph, best, limit)).cyclic or best
    latency = best.latency(graph)
    return _ask(graph, budget, 0.1, lambda limit: least_memory(graph, best, limit, latency)).cyclic or best


def _ask(graph: BlockGraph, budget: Budget, share: float, question: Callable[[Limit], Repetend]) -> Repetend:
    """The answer to a question that may take a share of what is left; none where its model alone would take long."""
    shares = [sum(device in block.devices for block in graph.blocks) for device in range(graph.devices)]
    pairs = sum(count * (count - 1) // 2 for count in shares)
    if budget.over or pairs > _PAIRS_PER_SECOND * budget.options.time_limit:
        return Repetend(Status.UNKNOWN, None, None, 0.0)
    found = question(budget.limit(share))
    budget.spend(found.work)
    return found
