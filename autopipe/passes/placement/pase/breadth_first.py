"""Dynamic programming over operators in breadth-first order: what PaSE's order is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_operators
from autopipe.passes.placement.pase.placing import in_stages
from autopipe.passes.sharding.tables import Tables
from autopipe.passes.solvers.min_sum import Assignment, TableTooLargeError, eliminate


@dataclass(frozen=True, slots=True)
class BreadthFirst:
    """Finds the splits that make a step shortest by dynamic programming in breadth-first order: a baseline for pase.

    Elango, "PaSE" (IPDPS 2021), section III-A. It is exact, knows no memory limit while it searches, and gives up where
    its tables do not fit: on most models with branches.
    """

    name: ClassVar[str] = "breadth_first"

    def division(self, graph: Graph) -> Division:
        """It makes one stage."""
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for an empty model or devices that differ."""
        check_operators(problem)
        check_one_kind(problem, self.name)

    def run(self, problem: Problem) -> Placement:
        """One stage.

        Raises ConfigurationError for constraints that cannot be followed, InfeasibleError where tables are too large,
        with their size, or memory does not hold what is found.
        """
        return in_stages(problem, 1, self._eliminated)

    def _eliminated(self, tables: Tables, limit: float | None) -> Assignment:
        if limit is not None:
            raise InfeasibleError("breadth_first knows no memory limit", hint="take strategy pase")
        try:
            return eliminate(tables.model, ordering="breadth_first")
        except TableTooLargeError as error:
            size = error.message.partition(";")[0]
            raise InfeasibleError(
                f"breadth_first cannot search this model: {size}", hint="strategy pase finds the same with less"
            ) from error
