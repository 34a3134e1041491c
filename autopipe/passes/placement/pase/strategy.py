"""PaSE as a strategy: the splits of every node that make a step shortest.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.fit import fitted
from autopipe.passes.lower.stages import assign_nodes
from autopipe.passes.placement.pase.ground import Terms
from autopipe.passes.placement.pase.tables import make_tables
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
        graph = problem.graph
        devices = tuple(range(problem.cluster.size))
        stage = Stage(tuple(range(len(graph.nodes))), devices, problem.micro_batch_size)
        wanted = (problem.loss,) if problem.train and problem.loss is not None else graph.outputs
        (plan,) = assign_nodes(graph, Placement((stage,)), wanted)
        tables = make_tables(problem, [node for node, _ in plan.nodes], devices, Terms(given=frozenset(plan.outputs)))
        answer = solve(tables.model, time_limit=problem.time_limit)
        splits = tables.splits(answer.choice)
        return fitted(problem, Placement((Stage(stage.nodes, devices, problem.micro_batch_size, splits),)))
