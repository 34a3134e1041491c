"""The least cost within a memory limit.

A price for each byte turns the limit into costs; the least cost at any price bounds the least cost within the limit
(Lagrangian relaxation). The price is moved to where the bound is highest. What remains between the bound and the best
choice that fits is searched with lists of labels, cost and memory, in place of tables.
"""

from __future__ import annotations

import numpy as np

from autopipe.passes.solvers.min_sum.answer import Assignment, bound_of
from autopipe.passes.solvers.min_sum.budget import Budget
from autopipe.passes.solvers.min_sum.fronts import least_memory
from autopipe.passes.solvers.min_sum.goal import MemoryLimitedObjective
from autopipe.passes.solvers.min_sum.model import Array, MinSum, Number
from autopipe.passes.solvers.min_sum.part import Subproblem
from autopipe.passes.solvers.min_sum.pricing import memory_alone, priced
from autopipe.passes.solvers.min_sum.restriction import chosen, everything, restricted
from autopipe.passes.solvers.min_sum.search import search
from autopipe.passes.solvers.min_sum.unlimited import ReducedStart, solve_unlimited

FLAT = 1e-9
"""Of a cost: a price whose best choice is better by less tells nothing new."""
FEW = 4
"""A reduced model is searched alone once it is this many times smaller; until then equal layers stay equal."""
ONE_PRICE = 0.1
"""Of the work left: what the search at one price may take; its bound is one even where its answer is not proven."""
COARSE = 0.02
"""Of the cost: as long as the gap is wider, two more sweeps at a price must do."""
ROUNDS = 3
"""Pairs of sweeps of the smaller model before the whole one is searched."""


def solve_within(model: MinSum, limit: Number, free: Assignment, budget: Budget) -> Assignment:
    """The best choice of a merged model that needs no more than `limit` bytes; where none fits, that of least memory.

    `free` is the best without a limit.
    Raises InfeasibleError where every choice is forbidden.
    """
    least = solve_unlimited(memory_alone(model), budget)
    if least.cost > limit:
        cost = model.cost_of(least.choice)
        return Assignment(least.choice, cost, cost, least.proven, least.cost, fits=False)
    goal = MemoryLimitedObjective(model, limit, float(free.bound))
    goal.offer(least.choice)
    kept = _fitting(model, limit)
    bound, kept = _price(model, goal, kept, free, budget)
    proven = bound >= goal.cost
    if not proven and budget.left:
        reached = _close(model, goal, kept, budget)
        proven = reached >= goal.cutoff
        bound = max(bound, reached - goal.rate * limit)
    return Assignment(goal.choice, goal.cost, bound_of(bound, goal.cost, proven), proven, goal.memory)


def _fitting(model: MinSum, limit: Number) -> list[Array]:
    """Of every node: configurations that fit beside the least of all others."""
    if model.memory is None:
        return everything(model)
    spare = limit - sum(least_memory(model))
    return [np.flatnonzero(memory - memory.min() <= spare) for memory in model.memory]


def _price(
    model: MinSum, goal: MemoryLimitedObjective, kept: list[Array], free: Assignment, budget: Budget
) -> tuple[float, list[Array]]:
    """The highest bound of any price, which the goal takes for its own, and what may be in a better choice.

    The best choice at a price lies on the lower hull of all pairs of memory and cost. Of a point on either side of the
    limit, the next price is the slope between them; the last is the slope of the hull's edge above the limit.
    """
    over, under = (free.cost, free.memory), (goal.cost, goal.memory)
    bound = float(free.bound)
    while budget.left and bound < goal.cost and over[0] < under[0]:
        rate = (under[0] - over[0]) / (over[1] - under[1])
        begun = ReducedStart(priced(restricted(model, kept), rate), budget)
        left = _swept(begun, goal, rate, kept, budget)
        if left is None:
            return float(goal.cost), kept
        line = over[0] + rate * over[1]
        line -= FLAT * abs(line)
        found = begun.solve(budget.share(0.0 if goal.cost - bound > COARSE * abs(goal.cost) else ONE_PRICE))
        if found.cost >= line and not found.proven:
            found = begun.solve(budget.share(ONE_PRICE))
        choice = chosen(kept, found.choice)
        goal.offer(choice)
        if found.bound - rate * goal.limit > bound:
            bound = float(found.bound) - rate * goal.limit
            goal.rate, goal.bound = rate, float(found.bound)
        point = (model.cost_of(choice), found.memory)
        if found.cost >= line:
            break
        over, under = (over, point) if point[1] <= goal.limit else (point, under)
        if FEW * _cells(model, left) < _cells(model, kept):
            kept = left
    return bound, kept


def _close(model: MinSum, goal: MemoryLimitedObjective, kept: list[Array], budget: Budget) -> float:
    """Search what may cost no more than the best choice known at the goal's price; the bound at that price."""
    begun = ReducedStart(priced(restricted(model, kept), goal.rate), budget)
    left: list[Array] | None = kept
    for _ in range(ROUNDS):
        left = _swept(begun, goal, goal.rate, kept, budget)
    return goal.cutoff if left is None else search(Subproblem(priced(model, goal.rate), left), goal, budget)


def _swept(
    begun: ReducedStart, goal: MemoryLimitedObjective, rate: float, kept: list[Array], budget: Budget
) -> list[Array] | None:
    """Configurations left of `kept` after a sweep forth and one back; None if there are none."""
    part, reduction = begun.part, begun.reduction
    for forward in (True, False):
        goal.offer(chosen(kept, reduction.expanded(part.sweep(forward))))
        budget.spend(part.dual.work)
    cutoff = float(goal.cost) + rate * goal.limit
    left = list(kept)
    for node, keep in zip(reduction.nodes, part.at(part.within(cutoff)), strict=True):
        left[node] = kept[node][keep]
    return left if all(len(keep) for keep in left) else None


def _cells(model: MinSum, kept: list[Array]) -> int:
    return sum(len(kept[edge.source]) * len(kept[edge.target]) for edge in model.edges)
