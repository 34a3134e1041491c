"""Within a memory limit: a price for each byte, moved to where the bound is highest (Lagrangian relaxation).

The best choice at any price bounds what fits. Of choices on either side of the limit the next price is the slope
between them; mixtures of them come closer to the limit than any price does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.passes.placement.tepdist.mixing import best_mixture
from autopipe.passes.placement.tepdist.path import is_over
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import Array

AtPrice = Callable[[float], Assignment]
"""For a price a byte the best choice; its bound is that of cost and price together."""

ROUNDS = 8
"""Prices that are tried at most."""
CLOSE = 1e-3
"""Share of the cost that is not worth another price."""
_SAME = 1e-9
"""Share of a cost that is rounding."""


@dataclass(slots=True, eq=False)
class PricedSearch:
    """State of the search for a price."""

    model: MinSum
    rank: Array
    limit: float
    choice: tuple[int, ...]
    """The best that fits."""
    cost: float
    """Of that choice."""
    rate: float = 0.0
    """The price of the highest bound."""
    bound: float = 0.0
    """No choice within the limit costs less."""

    @property
    def answer(self) -> Assignment:
        """The best answer by now."""
        proven = self.cost - self.bound <= _SAME * abs(self.cost)
        return Assignment(self.choice, self.cost, self.bound, proven, self.model.memory_of(self.choice))

    def raise_bound(self, bound: float) -> None:
        """Nothing that fits costs less than this."""
        self.bound = min(max(self.bound, bound), self.cost)

    def offer(self, choice: Sequence[int]) -> None:
        """Take a choice that fits and costs less."""
        cost = float(self.model.cost_of(choice))
        if cost < self.cost and self.model.memory_of(choice) <= self.limit:
            self.choice, self.cost = tuple(choice), cost

    def mix(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Take the best mixture of two choices, if that is better."""
        for first, last in ((one, other), (other, one)):
            if found := best_mixture(self.model, self.rank, first, last, self.limit):
                self.offer(found)


def search_price(
    model: MinSum,
    rank: Array,
    limit: float,
    free: Assignment,
    least: Sequence[int],
    at_price: AtPrice,
    end: float | None,
    enough: float = math.inf,
) -> PricedSearch:
    """The best within `limit` bytes of what prices and mixtures find; `free` needs more, `least` does not.

    Variables come one after the other by `rank`; no price is tried after `end` of the clock, nor once it is known that
    nothing costs less than `enough`.
    """
    found = PricedSearch(model, rank, limit, tuple(least), float(model.cost_of(least)), bound=float(free.bound))
    over, under = free.choice, tuple(least)
    found.mix(over, under)
    for _ in range(ROUNDS):
        more = model.memory_of(over) - model.memory_of(under)
        saved = model.cost_of(under) - model.cost_of(over)
        done = found.cost - found.bound <= CLOSE * found.cost or found.bound >= enough
        if is_over(end) or saved <= 0 or more <= 0 or done:
            break
        rate = float(saved) / float(more)
        line = float(model.cost_of(over)) + rate * float(model.memory_of(over))
        answer = at_price(rate)
        if answer.bound - rate * limit > found.bound:
            found.rate, found.bound = rate, float(answer.bound) - rate * limit
        memory = model.memory_of(answer.choice)
        if float(model.cost_of(answer.choice)) + rate * float(memory) >= line * (1 - _SAME):
            break
        over, under = (over, answer.choice) if memory <= limit else (answer.choice, under)
        found.offer(answer.choice)
        found.mix(over, under)
    found.raise_bound(found.bound)
    return found
