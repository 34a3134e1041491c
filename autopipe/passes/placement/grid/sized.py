"""The problem on micro-batches of one size, and the placement of a factorisation there."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import ResolvedConstraint, wishes_of
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.cost.measured import resized
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.placement.grid.degrees import Degrees
from autopipe.passes.sharding.regions import (
    check_samples,
    settled_stages,
    visited,
    whole_group_splits,
    with_samples_split,
)

Nodes = tuple[tuple[int, ...], ...]
"""The nodes of each stage, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedProblem:
    """Facts on micro-batches of one size."""

    problem: Problem
    samples: SampleAxes
    wishes: tuple[ResolvedConstraint, ...]

    @staticmethod
    def of(problem: Problem, size: int) -> SizedProblem:
        """Raises ConfigurationError or ModelError where there can be no micro-batches of `size` samples."""
        own = resized(problem, size)
        return SizedProblem(own, sample_axes(own.graph), wishes_of(own))

    def placement(self, degrees: Degrees, chunks: int, wave: bool) -> Placement:
        """The stages of a factorisation, recomputing where all are to.

        Raises InfeasibleError where replicas cannot share the samples, or the operators are too few.
        """
        problem = self.problem
        check_samples(problem, degrees.data, "grid")
        groups = visited(degrees.groups(), chunks, wave)
        settled = settled_stages(self.wishes, groups, "grid") if self.wishes else {}
        again = problem.train and problem.recompute == "full"
        shared = self._shared_by(degrees)
        stages = []
        for nodes, group in zip(cut_into_stages(problem, groups, settled, degrees.data), groups, strict=True):
            own = {node: shared[node] for node in nodes if node in shared}
            splits = with_samples_split(self.samples, nodes, degrees.data, own)
            stages.append(Stage(nodes, group, problem.micro_batch_size, splits, again))
        return Placement(tuple(stages))

    def _shared_by(self, degrees: Degrees) -> dict[int, tuple[Split, ...]]:
        """The splits of the nodes that a replica's devices share."""
        found = whole_group_splits(self.problem.graph, degrees.data, degrees.tensor)
        if not found and degrees.tensor > 1:
            raise InfeasibleError(f"{degrees.tensor} devices can share no layer", where="strategy.tensor")
        return found
