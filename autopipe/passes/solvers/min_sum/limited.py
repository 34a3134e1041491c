"""The least cost within a memory limit.

A price for each byte turns the limit into costs; the least cost at any price bounds the least cost within the limit
(Lagrangian relaxation). The price is moved to where the bound is highest. What remains between the bound and the best
choice that fits is searched with lists of labels, cost and memory, in place of tables.
"""

from __future__ import annotations

import numpy as np

from autopipe.passes.solvers.min_sum.answer import Answer, bound_of
from autopipe.passes.solvers.min_sum.budget import Budget
from autopipe.passes.solvers.min_sum.fronts import least_memory
from autopipe.passes.solvers.min_sum.goal import Within
from autopipe.passes.solvers.min_sum.model import Array, MinSum, Number
from autopipe.passes.solvers.min_sum.part import Part
from autopipe.passes.solvers.min_sum.pricing import memory_alone, priced
from autopipe.passes.solvers.min_sum.restriction import everything
from autopipe.passes.solvers.min_sum.search import search
from autopipe.passes.solvers.min_sum.unlimited import solve_part, solve_unlimited

FLAT = 1e-9
"""Of a cost: a price whose best choice is better by less tells nothing new."""


def solve_within(model: MinSum, limit: Number, free: Answer, budget: Budget) -> Answer:
    """The best choice of a merged model that needs no more than `limit` bytes; where none fits, that of least memory.

    `free` is the best without a limit.
    Raises InfeasibleError where every choice is forbidden.
    """
    least = solve_unlimited(memory_alone(model), budget)
    if least.cost > limit:
        cost = model.cost_of(least.choice)
        return Answer(least.choice, cost, cost, least.proven, least.cost, fits=False)
    goal = Within(model, limit, float(free.bound))
    goal.offer(least.choice)
    bound, kept = _price(model, goal, free, budget)
    proven = bound >= goal.cost
    if not proven:
        reached = search(Part(priced(model, goal.rate), kept), goal, budget)
        proven = reached >= goal.cutoff
        bound = max(bound, reached - goal.rate * limit)
    return Answer(goal.choice, goal.cost, bound_of(bound, goal.cost, proven), proven, goal.memory)


def _fitting(model: MinSum, limit: Number) -> list[Array]:
    """Of every node: configurations that fit beside the least of all others."""
    if model.memory is None:
        return everything(model)
    spare = limit - sum(least_memory(model))
    return [np.flatnonzero(memory - memory.min() <= spare) for memory in model.memory]


def _price(model: MinSum, goal: Within, free: Answer, budget: Budget) -> tuple[float, list[Array]]:
    """The highest bound of any price, which the goal takes for its own, and what may be in a better choice.

    The best choice at a price lies on the lower hull of all pairs of memory and cost. Of a point on either side of the
    limit, the next price is the slope between them; the last is the slope of the hull's edge above the limit.
    """
    kept = _fitting(model, goal.limit)
    over, under = (free.cost, free.memory), (goal.cost, goal.memory)
    bound = float(free.bound)
    while budget.left and bound < goal.cost and over[0] < under[0]:
        rate = (under[0] - over[0]) / (over[1] - under[1])
        with_price = priced(model, rate)
        part = Part(with_price, kept)
        for forward in (True, False):
            goal.offer(part.sweep(forward))
            budget.spend(part.dual.work)
        positions = part.within(goal.cost + rate * goal.limit)
        if not all(len(places) for places in positions):
            return float(goal.cost), kept
        kept = part.at(positions)
        found = solve_part(part, with_price, budget)
        goal.offer(found.choice)
        if found.bound - rate * goal.limit > bound:
            bound = float(found.bound) - rate * goal.limit
            goal.rate, goal.bound = rate, float(found.bound)
        point = (model.cost_of(found.choice), found.memory)
        line = over[0] + rate * over[1]
        if found.cost >= line - FLAT * abs(line):
            break
        over, under = (over, point) if point[1] <= goal.limit else (point, under)
    return bound, kept
