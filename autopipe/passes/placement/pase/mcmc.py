"""A random walk through the strategies that pase chooses from, as FlexFlow searches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_operators
from autopipe.passes.placement.pase.placing import in_stages
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.tables import Tables
from autopipe.passes.solvers.min_sum import Assignment
from autopipe.passes.solvers.min_sum.metropolis import walk


@dataclass(frozen=True, slots=True)
class Mcmc:
    """Changes one operator's split at random, again and again, and keeps the best it meets: a baseline for pase.

    It begins with data parallelism, and accepts what costs more with a chance that falls with the difference: the
    Metropolis search of Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks" (FlexFlow, 2018),
    section 6, over pase's splits and costs. The problem's seed draws the changes.
    """

    iterations: int = 20_000
    """The most changes that are tried; fewer where half of them brought nothing better."""
    temperature: float = 0.1
    """How much worse a change may be for a chance of 1 in e, as a share of what one operator costs on average."""

    name: ClassVar[str] = "mcmc"

    def division(self, graph: Graph) -> Division:
        """It makes one stage."""
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range, InfeasibleError for an empty model or uneven devices."""
        if self.iterations < 0 or self.temperature < 0:
            raise ConfigurationError("iterations and temperature must be 0 or more", where="strategy")
        check_operators(problem)
        check_one_kind(problem, self.name)

    def run(self, problem: Problem) -> Placement:
        """One stage.

        Raises ConfigurationError for constraints that cannot be followed, InfeasibleError where nothing that the walk
        met fits into memory.
        """
        return replace(in_stages(problem, 1, partial(self._walk, problem)), proof=None)

    def _walk(self, problem: Problem, tables: Tables, limit: float | None) -> Assignment:
        hubs = len(tables.model.costs) - len(tables.nodes)
        return walk(
            tables.model,
            [*_data_parallel(problem, tables), *[0] * hubs],
            iterations=self.iterations,
            temperature=self.temperature,
            seed=problem.seed,
            followers=hubs,
            memory_limit=limit,
        )


def _data_parallel(problem: Problem, tables: Tables) -> list[int]:
    """For each node the configuration that shares its samples among most devices, and splits nothing else if it may."""
    axes = sample_axes(problem.graph).axes

    def degree(node: int, splits: Splits) -> int:
        if any(split.axis != axes[node] for split in splits):
            return 0
        return splits[0].degree if splits else 1

    return [
        max(
            (number for number, cost in enumerate(costs) if cost < math.inf),
            key=lambda number: degree(node, configurations[number]),
            default=0,
        )
        for node, configurations, costs in zip(tables.nodes, tables.configurations, tables.model.costs, strict=False)
    ]
