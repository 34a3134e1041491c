"""Result of a solver, and its proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopipe.passes.solvers.min_sum.model import MinSum, Number


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every node, and how far from the best it can be."""

    choice: tuple[int, ...]
    """The configuration of every node."""
    cost: Number
    """An int, exactly, where all costs are integers."""
    bound: Number
    """No choice (within the memory limit, if there is one) costs less."""
    proven: bool
    """Nothing is better: no choice that fits costs less; where `fits` is false, no choice needs less memory."""
    memory: Number = 0
    """Bytes of the choice."""
    fits: bool = True
    """True if the memory is within the limit. If not, the choice is the one of least memory that was found."""

    @property
    def gap(self) -> float:
        """By how much the cost may exceed the best, as a share of the cost; 0 where it is proven to be the best."""
        if self.proven or self.cost == self.bound:
            return 0.0
        return float(self.cost - self.bound) / abs(self.cost) if self.cost else float("inf")


def bound_of(least: float, cost: Number, proven: bool) -> Number:
    """Lower bound to report for a choice of that cost when nothing costs less than `least`, but for rounding."""
    if proven:
        return cost
    return math.ceil(least) if isinstance(cost, int) and math.isfinite(least) else least


def counted(answer: Assignment, model: MinSum) -> Assignment:
    """The answer with cost and memory of its choice in the model as it was given, which may round them otherwise."""
    cost = model.cost_of(answer.choice)
    bound = cost if answer.proven and answer.fits else answer.bound
    return replace(answer, cost=cost, bound=bound, memory=model.memory_of(answer.choice))
