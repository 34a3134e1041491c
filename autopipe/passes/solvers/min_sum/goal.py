"""Objective of a search: the least cost of all, or the least within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.elimination import MAX_BYTES, eliminate_in, size
from autopipe.passes.solvers.min_sum.front import Sieve
from autopipe.passes.solvers.min_sum.fronts import eliminate_within, least_memory
from autopipe.passes.solvers.min_sum.model import MinSum, Number
from autopipe.passes.solvers.min_sum.ordering import smallest_table, with_choice
from autopipe.passes.solvers.min_sum.part import Subproblem
from autopipe.passes.solvers.min_sum.restriction import chosen, conditioned, restricted

SHARES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Of the gap: configurations are eliminated up to the first of these thresholds whose work is allowed."""
LABEL = 100
"""Sums that could be compared in the time that a label takes."""
MAX_CELLS = 1e7
"""Pairs of configurations that are looked at one by one."""
MAX_ROOM = 200_000
"""Labels that a list may keep."""


class Objective(Protocol):
    """Judges choices, and knows how to find the best one of a few configurations."""

    choice: tuple[int, ...]
    """The best known; () before there is one."""
    cost: Number
    """Of that choice, inf before there is one."""
    bound: float
    """No choice costs less in the model that is searched."""

    @property
    def cutoff(self) -> float:
        """A part in whose model everything costs as much holds nothing better."""

    def offer(self, choice: Sequence[int]) -> None:
        """Take the choice if it is better."""

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """Offer the best choice of as many of the part's cheapest configurations as can be eliminated with the work.

        Returns what that proves, `low` being known: that all choices in the part which are better than the best known
        cost no less. And the work that it took.
        """


class CostObjective:
    """The least cost of a merged model."""

    def __init__(self, model: MinSum) -> None:
        self._model = model
        self.bound = -float("inf")
        self.choice: tuple[int, ...] = ()
        self.cost: Number = float("inf")

    @property
    def cutoff(self) -> float:
        """The least cost known."""
        return float(self.cost)

    def offer(self, choice: Sequence[int]) -> None:
        """Take the choice if it costs less."""
        cost = self._model.cost_of(choice)
        if not self.choice or cost < self.cost:
            self.choice, self.cost = tuple(choice), cost

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """By tables: those up to a threshold. Where none of their choices costs as little, none of the part's does."""
        top = min(self.cutoff, part.top)
        for share in SHARES:
            threshold = low + share * (top - low)
            positions = part.within(threshold)
            sizes = [len(places) for places in positions]
            around = with_choice(part.around, sizes)
            order = smallest_table(around, sizes)
            takes = size(around, sizes, order)
            if takes.work <= work and 8 * takes.entries <= MAX_BYTES:
                kept = part.at(positions)
                with suppress(InfeasibleError):
                    found = eliminate_in(conditioned(restricted(self._model, kept)), order)
                    self.offer(chosen(kept, found.choice))
                return self.cutoff if share == 1.0 else min(threshold, self.cutoff), takes.work
        return low, 0.0


class MemoryLimitedObjective:
    """The least cost of a merged model within a memory limit; what is searched is the model with a price for bytes."""

    def __init__(self, model: MinSum, limit: Number, bound: float) -> None:
        self._model = model
        self.limit = limit
        """Bytes."""
        self.rate = 0.0
        """What a byte costs in the model that is searched."""
        self.bound = bound
        self.choice: tuple[int, ...] = ()
        self.cost: Number = float("inf")
        self.memory: Number = 0

    @property
    def cutoff(self) -> float:
        """The least cost known, and the price of all bytes there are."""
        return float(self.cost) + self.rate * self.limit

    def offer(self, choice: Sequence[int]) -> None:
        """Take the choice if it fits and costs less."""
        cost = self._model.cost_of(choice)
        memory = self._model.memory_of(choice)
        if cost < self.cost and memory <= self.limit:
            self.choice, self.cost, self.memory = tuple(choice), cost, memory

    def eliminate(self, part: Subproblem, low: float, work: float) -> tuple[float, float]:
        """By lists of labels: those up to a threshold, which is lowered where lists become too long."""
        for share in SHARES:
            threshold = low + share * (self.cutoff - low)
            positions = part.within(threshold)
            if part.dual.cells([len(places) for places in positions]) <= min(MAX_CELLS, work / LABEL):
                break
        else:
            return low, 0.0
        try:
            few = part.cut(positions)
        except InfeasibleError:
            return threshold, 0.0
        model = conditioned(restricted(self._model, few.kept))
        sizes = [len(keep) for keep in few.kept]
        sieve = Sieve(
            sizes=sizes,
            limit=self.limit,
            least=sum(least_memory(model)),
            rate=self.rate,
            floors=few.dual.reach,
            bound=self.bound,
            room=min(MAX_ROOM, max(1, round(work / LABEL / len(sizes)))),
            threshold=threshold + 2 * part.dual.rounding,
        )
        pairs = [pair for pair in few.dual.pairs() if 1 not in pair.shape]
        order = smallest_table(with_choice(few.around, sizes), sizes)
        found = eliminate_within(model, order, sieve, pairs)
        if found:
            self.offer(chosen(few.kept, found))
        return max(low, min(sieve.threshold - part.dual.rounding, self.cutoff)), LABEL * sieve.formed
