"""PaSE as a strategy: the splits of every node that make a step shortest.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.problem import Problem
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_operators, fitted
from autopipe.passes.placement.pase.overlap import solve_overlapped
from autopipe.passes.placement.pase.paper.placing import placement_of
from autopipe.passes.placement.pase.paper.search import search
from autopipe.passes.placement.pase.placing import in_stages
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.search import Exact
from autopipe.passes.sharding.tables import Tables
from autopipe.passes.solvers.min_sum import Assignment, MinSum, TableTooLargeError, eliminate


@dataclass(frozen=True, slots=True)
class Pase:
    """Splits every operator along any of its axes, so that a step is shortest."""

    solver: Literal["exact", "elimination"] = "exact"
    """`exact`: a bound from the dual, pruning, and elimination of what is left; within memory. `elimination`: the
    paper's dynamic programming, which knows no memory and gives up where tables are too large."""
    ordering: Literal["generate_seq", "breadth_first", "min_fill"] = "generate_seq"
    """In which order `elimination` takes the operators; the paper's is `generate_seq`."""
    costs: Literal["autopipe", "pase-paper"] = "autopipe"
    """`autopipe`: seconds on the cluster at hand. `pase-paper`: the paper's operations and words, to reproduce it."""
    search_space: Literal["executable", "paper"] = "executable"
    """`executable`: the splits that programs can be generated for. `paper`: those of the paper, executable or not; it
    goes with `costs: pase-paper`."""
    stages: int = 1
    """Pipeline stages, of equal groups of devices; splits are searched inside each."""

    overlap: bool = False
    """True if the exchange of gradients counts only as far as the last micro-batch's backward does not hide it."""

    name: ClassVar[str] = "pase"

    def division(self, graph: Graph) -> Division:
        """A pipeline's, where several stages are asked for."""
        return Division.MANY if self.stages > 1 else Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options that do not go together, InfeasibleError for an empty model."""
        if (self.costs == "pase-paper") != (self.search_space == "paper"):
            raise ConfigurationError(
                f"costs {self.costs} and search_space {self.search_space} do not go together",
                hint="take costs: pase-paper with search_space: paper, or neither",
                where="strategy",
            )
        if not 1 <= self.stages <= problem.cluster.size:
            raise ConfigurationError(
                f"stages is {self.stages}, and there are {problem.cluster.size} devices",
                hint="give each stage at least one device",
                where="strategy",
            )
        if self.search_space == "paper" and (problem.constraints or self.stages > 1):
            raise ConfigurationError(
                "the paper's search space has neither constraints nor stages",
                hint="take search_space: executable",
                where="strategy",
            )
        check_operators(problem)
        if self.stages == 1:
            check_one_kind(problem, self.name)

    def run(self, problem: Problem) -> Placement:
        """The placement.

        Raises ConfigurationError naming constraints that contradict one another or cannot be followed, InfeasibleError
        where memory does not hold any placement, with the least excess, or elimination's tables are too large.
        """
        exact = Exact(problem.time_limit)
        if self.search_space == "paper":
            found = search(problem, lambda model: self._solved(model, None, exact))
            proof = SplitProof(found.cost, found.bound, found.proven, "operations")
            return replace(fitted(problem, placement_of(problem, found)), proof=proof)

        def solver(tables: Tables, limit: float | None) -> Assignment:
            if self.overlap:
                return solve_overlapped(tables, lambda model: self._solved(model, limit, exact))
            return self._solved(tables.model, limit, exact)

        def placed(problem: Problem) -> Placement:
            return in_stages(problem, self.stages, solver, self.overlap)

        return best_order(problem, placed) if self.stages > 1 else placed(problem)

    def _solved(self, model: MinSum, limit: float | None, exact: Exact) -> Assignment:
        """The answer of the chosen solver, within `limit` bytes."""
        if self.solver == "exact":
            return exact.solved(model, limit)
        try:
            answer = eliminate(model, self.ordering)
        except TableTooLargeError as error:
            size = error.message.partition(";")[0]
            raise InfeasibleError(size, hint="take another ordering, or solver: exact", where="strategy") from error
        # It knows no limit: whether its answer keeps one is found afterwards.
        return replace(answer, fits=limit is None or answer.memory <= limit)
