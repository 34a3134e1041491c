"""Configurations that no best choice has are dropped where an integer program would be too large to be written.

The dual of the program's relaxation (`solvers/min_sum/dual`) says of each configuration what a choice with it costs at
least; those above a choice that is known are dropped, as solvers of integer programs do by reduced costs. Where that is
not enough, only the most promising are kept, and what was left out bounds what is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Subproblem
from autopipe.passes.solvers.min_sum.model import Array, everything

ROUNDS = 60
"""Sweeps forth and back at most."""
PROGRESS = 0.02
"""They go on while one of each closes this share of the gap."""
SLACK = 1e-9
"""Of a cost: what rounding may do to a sum of many."""
SHARES = (0.3, 0.1, 0.03, 0.01, 0.0)
"""Of the gap: thresholds that are tried where too much is left."""


@dataclass(frozen=True, slots=True, eq=False)
class ReducedModel:
    """A model with fewer configurations."""

    kept: tuple[Array, ...]
    """Of every variable, ascending."""
    reach: tuple[Array, ...]
    """Of each of these: no choice with it costs less."""
    choice: tuple[int, ...]
    """The best that was met, or known before; among what is kept, unless it costs more than the cutoff."""
    cost: float
    """Of that choice."""
    bound: float
    """No choice costs less."""
    left_out: float = np.inf
    """No choice costs less that has another configuration, but for those that cost more than `choice`."""

    @property
    def is_met(self) -> bool:
        """True if no choice costs less than the one that was met."""
        return self.cost - self.bound <= SLACK * abs(self.cost)

    def answer(self, model: MinSum) -> Assignment:
        """The choice that was met, where none costs less."""
        return Assignment(self.choice, self.cost, self.cost, True, model.memory_of(self.choice))


def fix_by_reduced_cost(
    model: MinSum, most: float = 0, known: Sequence[int] = (), cutoff: float | None = None
) -> ReducedModel:
    """Reduce a merged model until it has at most `most` pairs of configurations, or bounds get no better.

    A configuration stays if it may be in a choice that costs no more than `cutoff`; or, where none is given, than the
    best choice that is met or `known`. Raises InfeasibleError where every choice is forbidden, as far as pairs show it.
    """
    part = Subproblem(model, everything(model))
    choice, cost = tuple(known), float(model.cost_of(known)) if known else np.inf
    top = _at_most(cost if cutoff is None else cutoff)
    before = -np.inf
    for _ in range(ROUNDS):
        if choice and part.dual.cells([len(keep) for keep in part.kept]) <= most:
            break
        for forward in (True, False):
            met = part.sweep(forward)
            if (cost_met := float(model.cost_of(met))) < cost or not choice:
                choice, cost = met, cost_met
        top = _at_most(cost) if cutoff is None else top
        part.narrow(top)
        bound = part.bound
        if cost - bound <= SLACK * abs(cost) or bound - before < PROGRESS * (cost - before):
            break
        before = bound
    positions = part.within(top)
    reach = tuple(each[places] - part.dual.rounding for each, places in zip(part.dual.reach, positions, strict=True))
    return ReducedModel(tuple(part.at(positions)), reach, choice, cost, min(part.bound, cost))


def promising(model: MinSum, found: ReducedModel, most: float) -> ReducedModel:
    """The same with at most `most` pairs of configurations, or with no more than promise the least, and its choice."""
    top = max(float(reach.max()) for reach in found.reach)
    for share in SHARES:
        if _pairs(model, found.kept) <= most:
            break
        threshold = found.bound + share * max(0.0, top - found.bound)
        keep = [
            (reach <= threshold) | (kept == number)
            for kept, reach, number in zip(found.kept, found.reach, found.choice, strict=True)
        ]
        kept, reach = (
            tuple(each[which] for each, which in zip(every, keep, strict=True)) for every in (found.kept, found.reach)
        )
        found = replace(found, kept=kept, reach=reach, left_out=threshold)
    return found


def _pairs(model: MinSum, kept: Sequence[Array]) -> int:
    """Pairs of configurations on edges whose ends have a choice."""
    sizes = [len(keep) for keep in kept]
    ends = ((sizes[edge.source], sizes[edge.target]) for edge in model.edges)
    return sum(one * other for one, other in ends if min(one, other) > 1)


def _at_most(cost: float) -> float:
    return cost + SLACK * abs(cost)
