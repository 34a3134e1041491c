"""One size of micro-batches for all stages, found by trying all that there may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.cost.measured import resized


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A placement and the seconds that its step is estimated to take."""

    placement: Placement
    step_s: float


def best_size(problem: Problem, answer: Callable[[Problem, float], SweepResult]) -> Placement:
    """Of the answers for each size that the problem leaves open the one with the shortest step.

    `answer` is also told the seconds of the shortest step so far: it may raise InfeasibleError where it has none that
    takes less. Raises the InfeasibleError of the smallest micro-batches where there is no answer for any size.
    """
    best: SweepResult | None = None
    refused: InfeasibleError | None = None
    for size in problem.micro_batch_sizes or (problem.micro_batch_size,):
        try:
            found = answer(resized(problem, size), best.step_s if best else math.inf)
        except InfeasibleError as error:
            refused = refused or error
            continue
        if best is None or found.step_s < best.step_s:
            best = found
    if best is None:
        assert refused is not None, "there is a size at least"
        raise refused
    return best.placement
