"""Candidates of a plan's search, each with its result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """All that is decided before a placement and a schedule follow: naming it gives the same plan again."""

    strategy: str
    options: tuple[tuple[str, str], ...] = ()
    """The strategy's options that are not its defaults, as a configuration spells them."""
    schedule: str | None = None
    """None where no schedule was looked at."""
    micro_batches: int | None = None
    """None where they are left to the strategy, or to what it wants."""
    recompute: str = "none"
    shard: bool = False
    """True if replicas hold the optimizer's state in shares."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A choice and what came of it."""

    choice: Choice
    step_time_s: float | None = None
    """Of the simulated step; None where there is none."""
    lower_bound_s: float | None = None
    """No schedule of its placement takes less; None where there is no placement."""
    micro_batches: int | None = None
    """Micro-batches of its placement."""
    stages: int | None = None
    bubble_rate: float | None = None
    peak_memory_bytes: int | None = None
    """The most on any device."""
    refused: str | None = None
    """Why there is no step: in one line."""
    same_as: str | None = None
    """The strategy that came to the same placement before; the step is that one's."""

    @property
    def rank(self) -> tuple[float, float]:
        """Seconds of the step, infinite where there is none; of those without, then those of the bound."""
        if self.step_time_s is not None:
            return self.step_time_s, 0.0
        return math.inf, math.inf if self.lower_bound_s is None else self.lower_bound_s

    @property
    def is_bounded(self) -> bool:
        """True if it was left out because no schedule of its placement could be the shortest."""
        return self.choice.schedule is None and self.lower_bound_s is not None


def best_of_each(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Of each strategy the alternative with the shortest step, the first of equals; the best strategy first.

    Of several that came to the same placement it is the one that did so first.
    """
    found: dict[str, Alternative] = {}
    for each in alternatives:
        best = found.setdefault(each.choice.strategy, each)
        if each.rank < best.rank:
            found[each.choice.strategy] = each
    return tuple(sorted(found.values(), key=lambda each: (*each.rank, each.same_as is not None)))
