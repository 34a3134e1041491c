"""The factorisation and the micro-batches under which a step is shortest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopipe.ir.errors import AutopipeError, ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.cost.fit import fitted
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.grid.bounds import Bounds
from autopipe.passes.placement.grid.degrees import Degrees
from autopipe.passes.placement.grid.sized import Sized
from autopipe.passes.schedule.trial import busy_s, fitting_step_s


@dataclass(slots=True, eq=False)
class Search:
    """One search: the best placement so far, and the problem on micro-batches of the sizes that were looked into."""

    problem: Problem
    chunks: int
    wave: bool
    best: Placement | None = None
    best_s: float = math.inf
    refused: list[AutopipeError] = field(default_factory=list)
    _sized: dict[int, Sized] = field(default_factory=dict)

    def run(self, every: Sequence[Degrees], sizes: Sequence[int]) -> Placement:
        """The best of all factorisations on micro-batches of any of `sizes` samples, what promises most first.

        Left out is what cannot be shorter than what is known. Raises the first reason where there is no placement.
        """
        bounds = Bounds.of(self.problem)
        bounds.check_memory()
        candidates = [(degrees, size) for degrees in every for size in sizes if size % degrees.data == 0]
        estimates = {each: bounds.estimate_s(*each) for each in candidates}
        for degrees, size in sorted(candidates, key=estimates.__getitem__):
            if bounds.step_s(degrees, size) < self.best_s:
                self._try(degrees, size)
        if self.best is None:
            raise self._reason(every, sizes)
        return self.best

    def _try(self, degrees: Degrees, size: int) -> None:
        try:
            sized = self._of(size)
            placement = fitted(sized.problem, sized.placement(degrees, self.chunks, self.wave))
            costs = stage_costs(sized.problem, placement)
            if busy_s(costs, sized.problem.micro_batches) >= self.best_s:
                return
            step_s = fitting_step_s(sized.problem, placement, costs)
        except (ConfigurationError, InfeasibleError, ModelError) as error:
            self.refused.append(error)
            return
        if step_s < self.best_s:
            self.best, self.best_s = placement, step_s

    def _of(self, size: int) -> Sized:
        if size not in self._sized:
            self._sized[size] = Sized.of(self.problem, size)
        return self._sized[size]

    def _reason(self, every: Sequence[Degrees], sizes: Sequence[int]) -> AutopipeError:
        """Why there is no placement: what is said of the most promising candidate."""
        if self.refused:
            return self.refused[0]
        least = min((degrees.data for degrees in every), default=1)
        return InfeasibleError(
            f"grid cannot share a micro-batch of {sizes[-1]} samples equally among {least} replicas",
            hint="choose a micro-batch size that the replicas divide, or other degrees",
        )
