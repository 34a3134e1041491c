"""The default solver without a memory limit: dual bound, pruning, elimination of what is left, and branching.

Sweeps of the dual raise what each configuration surely costs; those above the best choice known are dropped.
Eliminating the configurations up to a threshold gives a choice, and a proof where it costs no more than the threshold:
whatever was left out costs more. A part that resists is cut in two, and the part with the least bound is next.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.answer import Answer
from autopipe.passes.solvers.min_sum.budget import Budget
from autopipe.passes.solvers.min_sum.elimination import MAX_BYTES, eliminate_in, size
from autopipe.passes.solvers.min_sum.model import MinSum
from autopipe.passes.solvers.min_sum.ordering import smallest_table
from autopipe.passes.solvers.min_sum.part import Best, Part

PROGRESS = 0.1
"""Sweeps go on while a pair of them closes this share of the gap."""
PATIENCE = 50
"""Where they do not, elimination may take so many times the work of the sweeps before the part is cut in two."""
SMALL = 1e5
"""Sums that an elimination may always compare."""
SHARES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
"""Of the gap: configurations are eliminated up to the first of these thresholds whose work is allowed."""


def search(model: MinSum, budget: Budget) -> Answer:
    """The best choice of a merged model, whatever memory it needs; with bound and gap where the budget ends first.

    Raises InfeasibleError where every choice is forbidden. Where none was found in time, the answer's cost is inf.
    """
    best = Best(model)
    root = Part(model)
    parts = [(root.bound, 0, root)]
    created = 0
    while parts and parts[0][0] < best.cost:
        _, number, part = heappop(parts)
        bound = _refine(part, best, budget)
        if bound >= best.cost:
            continue
        if not budget.left:
            heappush(parts, (bound, number, part))
            break
        for half in part.halves():
            created += 1
            heappush(parts, (max(bound, half.bound), created, half))
    proven = not parts or parts[0][0] >= best.cost
    if proven and math.isinf(best.cost):
        raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
    least = best.cost if proven else parts[0][0]
    bound = math.ceil(least) if isinstance(best.cost, int) else least
    return Answer(best.choice, best.cost, bound, proven, model.memory_of(best.choice))


def _refine(part: Part, best: Best, budget: Budget) -> float:
    """Improve the best choice and the part's bound, which is returned; the best cost if the part is exhausted."""
    work = 0.0
    before = -math.inf
    while True:
        for forward in (True, False):
            best.offer(part.sweep(forward))
            work += part.dual.work
            budget.spend(part.dual.work)
        try:
            part.narrow(best.cost)
        except InfeasibleError:
            return float(best.cost)
        bound = part.bound
        stalled = bound - before < PROGRESS * (best.cost - before)
        before = bound
        if bound < best.cost:
            bound = _eliminate(part, best, work * (PATIENCE if stalled else 1), budget)
        if stalled or bound >= best.cost or not budget.left:
            return bound


def _eliminate(part: Part, best: Best, allowed: float, budget: Budget) -> float:
    """Eliminate as many of the cheapest configurations as the work allows; what that proves of the part."""
    low = part.bound
    top = min(float(best.cost), max(float(reach.max()) for reach in part.dual.reach))
    for share in SHARES:
        threshold = low + share * (top - low)
        positions = part.within(threshold)
        order = smallest_table(part.around, [len(places) for places in positions])
        takes = size(part.around, [len(places) for places in positions], order)
        if takes.work > max(SMALL, min(allowed, budget.left)) or 8 * takes.entries > MAX_BYTES:
            continue
        budget.spend(takes.work)
        try:
            answer = eliminate_in(part.model(positions), order)
        except InfeasibleError:
            return float(best.cost) if share == 1.0 else threshold
        best.offer(part.choice([int(places[x]) for places, x in zip(positions, answer.choice, strict=True)]))
        return float(best.cost) if share == 1.0 or answer.cost <= threshold else threshold
    return low
