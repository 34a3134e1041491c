"""The least cost, whatever memory it needs."""

from __future__ import annotations

import math

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.answer import Answer, bound_of
from autopipe.passes.solvers.min_sum.budget import Budget
from autopipe.passes.solvers.min_sum.goal import Unlimited
from autopipe.passes.solvers.min_sum.model import MinSum
from autopipe.passes.solvers.min_sum.part import Part
from autopipe.passes.solvers.min_sum.restriction import everything
from autopipe.passes.solvers.min_sum.search import search


def solve_unlimited(model: MinSum, budget: Budget) -> Answer:
    """The best choice of a merged model; with bound and gap where the budget ends first.

    Raises InfeasibleError where every choice is forbidden. Where none was found in time, the answer's cost is inf.
    """
    return solve_part(Part(model, everything(model)), model, budget)


def solve_part(part: Part, model: MinSum, budget: Budget) -> Answer:
    """The best choice among the configurations of a part of the model; as `solve_unlimited` otherwise."""
    goal = Unlimited(model)
    bound = search(part, goal, budget)
    proven = bound >= goal.cutoff
    if proven and math.isinf(goal.cost):
        raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
    return Answer(goal.choice, goal.cost, bound_of(bound, goal.cost, proven), proven, model.memory_of(goal.choice))
