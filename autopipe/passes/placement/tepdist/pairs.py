"""Cost of a segment for each pair of strategies of its head and its tail: an integer program over its cones a pair.

Not every pair is solved: all begin with bounds, and the dynamic programming settles those on its best path. Equal
segments are one object, so that a pair settled for one is settled for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.one_program import least_by_program
from autopipe.passes.placement.tepdist.program import Programs
from autopipe.passes.solvers.min_sum import Edge, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Subproblem
from autopipe.passes.solvers.min_sum.model import Array, conditioned, everything, restricted

ROUNDS = 5
"""Sweeps forth and back for bounds."""
MOST_PAIRS = 20_000
"""Of configurations on edges: what a segment's integer program may have."""

Ends = tuple[int, ...]
"""A strategy for each of a segment's ends: none, its head's, or its head's and its tail's."""


@dataclass(eq=False, slots=True)
class Pairs:
    """A segment as a merged model of its own: its inner variables first, then its ends, which cost nothing here."""

    model: MinSum
    inner: int
    """How many variables are inner ones."""
    costs: Array
    """An axis for each end: what the best inside that is known costs where that is settled, else a bound."""
    bounds: Array
    """Of the same shape: nothing costs less."""
    settled: Array
    """Of the same shape: whether it is."""
    choices: dict[Ends, tuple[int, ...]] = field(default_factory=dict)
    """The best inside, where that is settled."""
    headed: set[int] = field(default_factory=set)
    """Strategies of the head of which there are bounds of their own."""

    @classmethod
    def of(cls, model: MinSum, inner: int) -> Pairs:
        """Begins with bounds; what has no inside is settled."""
        if inner:
            bounds = _bounds(model, inner)
            return cls(model, inner, bounds.copy(), bounds, np.asarray(np.isinf(bounds)))
        # Ends of one strategy have no edges.
        costs = model.edges[0].costs if model.edges else np.zeros([len(end) for end in model.costs])
        return cls(model, inner, costs, costs, np.ones(costs.shape, dtype=bool))

    def inside(self, ends: Ends) -> tuple[int, ...]:
        """The best choice of the inner variables, where that is settled."""
        return self.choices[ends] if self.inner else ()

    def approach(self, ends: Ends, programs: Programs) -> None:
        """Come closer to what the inside costs: by a bound for the head's strategy, and then for good."""
        if len(ends) == 2 and ends[0] not in self.headed:
            self._bound(ends[0])
        else:
            self._settle(ends, programs)

    def _bound(self, head: int) -> None:
        """Bounds for one strategy of the head and all of the tail."""
        self.headed.add(head)
        bounds = np.maximum(self.bounds[head], _bounds(self._given((head,)), self.inner)[0])
        self.bounds[head] = bounds
        self.costs[head] = np.where(self.settled[head], self.costs[head], bounds)
        self.settled[head] |= np.isinf(bounds)

    def _settle(self, ends: Ends, programs: Programs) -> None:
        """Solve the integer program for one strategy of each end."""
        self.settled[ends] = True
        try:
            found = least_by_program(self._given(ends), programs, MOST_PAIRS)
        except InfeasibleError:
            self.costs[ends] = self.bounds[ends] = np.inf
        else:
            self.costs[ends] = found.cost
            self.bounds[ends] = max(self.bounds[ends], found.bound)
            self.choices[ends] = found.choice[: self.inner]

    def _given(self, ends: Ends) -> MinSum:
        """The model with one strategy for the first ends."""
        kept = everything(self.model)
        for place, number in enumerate(ends, self.inner):
            kept[place] = np.array([number])
        return conditioned(restricted(self.model, kept))


def _bounds(model: MinSum, inner: int) -> Array:
    """For each strategy of the ends what the inside costs at least, an axis for each end."""
    ends = list(range(inner, len(model.costs)))
    shape = tuple(len(model.costs[end]) for end in ends)
    found = np.full(shape, np.inf)
    if len(ends) == 2:
        # What the dual knows of both ends together gathers on an edge between them.
        model = MinSum(model.costs, (*model.edges, Edge(ends[0], ends[1], np.zeros(shape))))
    try:
        part = Subproblem(model, everything(model))
    except InfeasibleError:
        return found
    for _ in range(ROUNDS):
        part.dual.tighten(forward=True)
        part.dual.tighten(forward=False)
    if len(ends) == 2:
        reach = part.dual.pairs()[-1]
    else:
        reach = part.dual.reach[ends[0]] if ends else np.array(part.dual.bound)
    found[np.ix_(*(part.kept[end] for end in ends))] = reach - part.dual.rounding
    return found
