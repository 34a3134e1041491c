"""The search of the default solver: dual bound, pruning, elimination of what is left, and branching.

Sweeps of the dual raise what each configuration surely costs; those above the best choice known are dropped.
Eliminating the configurations up to a threshold gives a choice, and a proof where it costs no more than the threshold:
whatever was left out costs more. A part that resists is cut in two, and the part with the least bound is next.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.budget import Budget
from autopipe.passes.solvers.min_sum.goal import Objective
from autopipe.passes.solvers.min_sum.part import Subproblem

PROGRESS = 0.1
"""Sweeps go on while a pair of them closes this share of the gap."""
PATIENCE = 50
"""Where sweeps do not help, elimination may take this many times their work before the part is cut in two."""
SMALL = 1e5
"""Sums that an elimination may always compare."""


def search(root: Subproblem, goal: Objective, budget: Budget) -> float:
    """Find the goal's best choice in a part; what is proven: nothing better costs less, in the model that is searched.

    That is at least the goal's cutoff where its best choice is proven to be the best.
    """
    parts = [(max(goal.bound, root.bound), 0, root)]
    created = 0
    while parts and parts[0][0] < goal.cutoff:
        bound, number, part = heappop(parts)
        bound = _refine(part, bound, goal, budget)
        if bound >= goal.cutoff:
            continue
        if not budget.left:
            heappush(parts, (bound, number, part))
            break
        for half in part.halves():
            created += 1
            heappush(parts, (max(bound, half.bound), created, half))
    return min(parts[0][0], goal.cutoff) if parts else goal.cutoff


def _refine(part: Subproblem, bound: float, goal: Objective, budget: Budget) -> float:
    """Improve the goal's choice and the part's bound, which is returned; the cutoff if the part is exhausted."""
    work = 0.0
    before = -math.inf
    while True:
        for forward in (True, False):
            goal.offer(part.sweep(forward))
            work += part.dual.work
            budget.spend(part.dual.work)
        try:
            part.narrow(goal.cutoff)
        except InfeasibleError:
            return goal.cutoff
        stalled = part.bound - before < PROGRESS * (goal.cutoff - before)
        before = part.bound
        bound = max(bound, part.bound)
        if bound < goal.cutoff:
            allowed = max(SMALL, min(budget.left, work * (PATIENCE if stalled else 1)))
            bound, took = goal.eliminate(part, bound, allowed)
            budget.spend(took)
        if stalled or bound >= goal.cutoff or not budget.left:
            return bound
