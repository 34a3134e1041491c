"""Level O3: one integer program over all cones."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.filling import fill_cones
from autopipe.passes.placement.tepdist.level import Level
from autopipe.passes.placement.tepdist.narrowing import fix_by_reduced_cost
from autopipe.passes.placement.tepdist.one_program import least_by_program, least_within
from autopipe.passes.placement.tepdist.pricing import PricedSearch
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import priced


class O3(Level):
    """All cones at once. A memory limit is a row of the program, for cones filled at one price of a byte."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time and size."""
        cones = fill_cones(model)
        found = least_by_program(cones.model, self.programs)
        return replace(found, choice=cones.expanded(found.choice))

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """Choice that meets the dual of the program, and its bound."""
        cones = fill_cones(model, rate)
        left = fix_by_reduced_cost(priced(cones.model, rate))
        return Assignment(cones.expanded(left.choice), left.cost, left.bound, proven=False)

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The program of all that may be better than what prices found.

        What it proves is for cones that are filled so; the bound is that of prices.
        """
        cones = fill_cones(model, found.rate)
        known = [found.choice[root] for root in cones.roots]
        try:
            answer = least_within(cones.model, found.limit, found.rate, found.cost, known, self.programs)
        except InfeasibleError:
            return found.answer
        found.offer(cones.expanded(answer.choice))
        return found.answer
