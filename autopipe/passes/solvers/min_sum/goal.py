"""What a search is for: the least cost of all, or the least within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.elimination import MAX_BYTES, eliminate_in, size
from autopipe.passes.solvers.min_sum.front import Filter, TooManyLabelsError
from autopipe.passes.solvers.min_sum.fronts import eliminate_within, least_memory
from autopipe.passes.solvers.min_sum.model import MinSum, Number
from autopipe.passes.solvers.min_sum.ordering import smallest_table
from autopipe.passes.solvers.min_sum.part import Part
from autopipe.passes.solvers.min_sum.restriction import Kept, chosen, restricted

LABEL = 50
"""Sums that could be compared in the time that a label takes."""
MAX_LABELS = 4e6


class Goal(Protocol):
    """Judges choices, and knows how to find the best one of a few configurations."""

    choice: tuple[int, ...]
    """The best known; () before there is one."""
    cost: Number
    """Of that choice, inf before there is one."""
    bound: float
    """No choice costs less in the model that is searched."""

    @property
    def cutoff(self) -> float:
        """Configurations that cost no less, in the model that is searched, are in no better choice."""

    def offer(self, choice: Sequence[int]) -> None:
        """Take the choice if it is better."""

    def eliminate(self, part: Part, positions: Kept, threshold: float, work: float) -> float | None:
        """Offer the best choice of the configurations at these positions, if it costs no more than the threshold.

        Returns the work that took; None where it would take more than `work`, and nothing was done.
        """


class Unlimited:
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

    def eliminate(self, part: Part, positions: Kept, threshold: float, work: float) -> float | None:
        """By tables."""
        sizes = [len(places) for places in positions]
        order = smallest_table(part.around, sizes)
        takes = size(part.around, sizes, order)
        if takes.work > work or 8 * takes.entries > MAX_BYTES:
            return None
        kept = part.at(positions)
        with suppress(InfeasibleError):
            self.offer(chosen(kept, eliminate_in(restricted(self._model, kept), order).choice))
        return takes.work


class Within:
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

    def eliminate(self, part: Part, positions: Kept, threshold: float, work: float) -> float | None:
        """By lists of labels."""
        kept = part.at(positions)
        model = restricted(self._model, kept)
        order = smallest_table(part.around, [len(places) for places in positions])
        length = min(MAX_LABELS, work / LABEL)
        slack = threshold - self.bound + part.dual.rounding
        wanted = Filter(self.limit, sum(least_memory(model)), self.rate, slack, length)
        try:
            found, labels = eliminate_within(model, order, wanted)
        except TooManyLabelsError:
            return None
        if found:
            self.offer(chosen(kept, found))
        return LABEL * labels
