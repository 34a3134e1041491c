"""PaSE as a strategy: the splits of every node that make a step shortest.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.placement.pase.placing import in_one_stage
from autopipe.passes.solvers.min_sum import solve


@dataclass(frozen=True, slots=True)
class Pase:
    """Splits every operator so that the step is shortest, over all devices."""

    name: ClassVar[str] = "pase"

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for an empty model."""
        if not problem.graph.nodes:
            raise InfeasibleError("the model has no operators to place")

    def run(self, problem: Problem) -> Placement:
        """The placement. Raises InfeasibleError where memory does not hold it."""
        return in_one_stage(problem, lambda tables: solve(tables.model, time_limit=problem.time_limit))
