"""The problem on micro-batches of one size, and the best placement of a factorisation there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import ResolvedConstraint, required_splits, wishes_of
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import resized
from autopipe.passes.placement.tepdist.inside import IntraStageSearch
from autopipe.passes.placement.tepdist.level import Level
from autopipe.passes.placement.tepdist.meshes import Mesh
from autopipe.passes.schedule.limits import busy_s, quick_step_seconds
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_degrees, settled_stages

Nodes = tuple[tuple[int, ...], ...]
"""The nodes of each stage, ascending."""

Divide = Callable[[Problem, Mesh, dict[int, int]], Nodes]
"""Divides a problem's nodes among the stages of a mesh, some nodes in stages that are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedProblem:
    """Facts on micro-batches of one size."""

    problem: Problem
    wishes: tuple[ResolvedConstraint, ...]
    wished: dict[int, Splits]
    """The splits that constraints ask for, by node."""
    insides: IntraStageSearch

    @staticmethod
    def of(problem: Problem, size: int, solver: Level) -> SizedProblem:
        """The problem on micro-batches of `size` samples.

        Raises ConfigurationError or ModelError where there can be none, and for constraints that cannot be followed.
        """
        own = resized(problem, size)
        wishes = wishes_of(own)
        wished = required_splits(wishes, sample_axes(own.graph)) if wishes else {}
        return SizedProblem(own, wishes, wished, IntraStageSearch.of(own, solver))

    def stages(self, mesh: Mesh, divide: Divide) -> Nodes:
        """The nodes of each stage. Raises ConfigurationError for constraints that the mesh cannot follow."""
        return divide(self.problem, mesh, settled_stages(self.wishes, mesh.groups, "this number of stages"))

    def placements(self, mesh: Mesh, stages: Nodes, limit_s: float) -> list[tuple[float, Placement]]:
        """Seconds of a step and the placement, for each way to split the stages that memory holds.

        Those are left out whose stages alone are busy for `limit_s`.

        Raises ConfigurationError for splits that are asked for and that a stage's devices cannot have, InfeasibleError
        where memory holds none, with the least excess.
        """
        again = self.problem.train and self.problem.recompute == "full"
        skeleton = Placement(
            tuple(
                Stage(nodes, group, self.problem.micro_batch_size, recompute=again)
                for nodes, group in zip(stages, mesh.groups, strict=True)
            )
        )
        check_degrees(self.problem, self.wished, skeleton)
        found, refused = [], None
        for each in self.insides.placements(skeleton, self.wished, limit_s):
            if busy_s(each.costs, self.problem.micro_batches) >= limit_s:
                continue
            try:
                found.append((quick_step_seconds(self.problem, each.placement, each.costs), each.placement))
            except InfeasibleError as error:
                refused = error
        if not found and refused is not None:
            raise refused
        return found
