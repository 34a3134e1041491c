"""The least cost, whatever memory it needs."""

from __future__ import annotations

import math

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.answer import Assignment, bound_of
from autopipe.passes.solvers.min_sum.budget import Budget
from autopipe.passes.solvers.min_sum.goal import CostObjective
from autopipe.passes.solvers.min_sum.model import MinSum
from autopipe.passes.solvers.min_sum.part import Subproblem
from autopipe.passes.solvers.min_sum.reduction import reduced
from autopipe.passes.solvers.min_sum.restriction import everything
from autopipe.passes.solvers.min_sum.search import search


class ReducedStart:
    """A merged model made smaller, and all of that as a part to be searched."""

    def __init__(self, model: MinSum, budget: Budget) -> None:
        """Raises InfeasibleError where every choice is forbidden, as far as pairs show it."""
        self._model = model
        self.reduction = reduced(model, sum(edge.costs.size for edge in model.edges))
        budget.spend(self.reduction.work)
        self.part = Subproblem(self.reduction.model, everything(self.reduction.model))

    def solve(self, budget: Budget) -> Assignment:
        """The best choice; with bound and gap where the budget ends first.

        Raises InfeasibleError where every choice is forbidden. Where none was found in time, the answer's cost is inf.
        """
        goal = CostObjective(self.reduction.model)
        bound = search(self.part, goal, budget)
        proven = bound >= goal.cutoff
        if proven and math.isinf(goal.cost):
            raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
        choice = self.reduction.expanded(goal.choice)
        cost = self._model.cost_of(choice)
        return Assignment(choice, cost, bound_of(bound, cost, proven), proven, self._model.memory_of(choice))


def solve_unlimited(model: MinSum, budget: Budget) -> Assignment:
    """The best choice of a merged model, whatever memory it needs; as `ReducedStart.solve` otherwise."""
    return ReducedStart(model, budget).solve(budget)
