"""How the outer search divides a model's nodes among stages."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Problem
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.partition.min_cut_ilp import divide
from autopipe.passes.placement.tepdist.meshes import Mesh
from autopipe.passes.placement.tepdist.sized import Nodes

_PATIENCE_S = 10.0
"""For one integer program, where there is no time limit: one of 96 layers in 16 stages takes three on an idle core."""


def linear_cut(problem: Problem, mesh: Mesh, settled: dict[int, int]) -> Nodes:
    """The stages of the operators in one line, the slowest as fast as it can be."""
    return cut_into_stages(problem, mesh.groups, settled)


@dataclass(frozen=True, slots=True, eq=False)
class LeastCrossing:
    """Even stages between which the fewest bytes cross, once for each number of stages: samples do not change it."""

    unbalance: float
    time_limit: float | None
    _known: dict[Hashable, Nodes | InfeasibleError] = field(default_factory=dict)

    def __call__(self, problem: Problem, mesh: Mesh, settled: dict[int, int]) -> Nodes:
        """The nodes of each stage. Raises InfeasibleError where the limit allows none, with the least that does."""
        if len({problem.cluster.devices[group[0]] for group in mesh.groups}) > 1:
            raise InfeasibleError("the integer program makes stages even, and their devices are of different kinds")
        key = mesh.stages, tuple(sorted(settled.items()))
        if key not in self._known:
            try:
                self._known[key] = self._divided(problem, mesh, settled)
            except InfeasibleError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _divided(self, problem: Problem, mesh: Mesh, settled: dict[int, int]) -> Nodes:
        if mesh.stages == 1:
            return (tuple(range(len(problem.graph.nodes))),)
        limit = _PATIENCE_S if self.time_limit is None else min(_PATIENCE_S, self.time_limit)
        return divide(problem, mesh.stages, self.unbalance, settled, limit).nodes
