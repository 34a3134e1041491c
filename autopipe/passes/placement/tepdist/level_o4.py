"""Level O4: one integer program over all operators."""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.level import Level
from autopipe.passes.placement.tepdist.narrowing import fix_by_reduced_cost
from autopipe.passes.placement.tepdist.one_program import least_by_program, least_within
from autopipe.passes.placement.tepdist.pricing import PricedSearch
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import merged, priced


class O4(Level):
    """All operators at once. A memory limit is a row of the program."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time and size."""
        return least_by_program(merged(model), self.programs)

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """Choice that meets the dual of the program, and its bound."""
        left = fix_by_reduced_cost(merged(priced(model, rate)))
        return Assignment(left.choice, left.cost, left.bound, proven=False)

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The program of all that may be better than what prices found."""
        try:
            answer = least_within(merged(model), found.limit, found.rate, found.cost, found.choice, self.programs)
        except InfeasibleError:
            return found.answer
        found.offer(answer.choice)
        found.raise_bound(float(answer.bound))
        return found.answer
