"""What a factorisation takes at least, and about, before any of its splits are searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.communication import all_reduce
from autopipe.passes.cost.fit import out_of_memory
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import accumulate_per_byte, node_seconds
from autopipe.passes.lower.stages import assign_nodes
from autopipe.passes.placement.tepdist.meshes import Mesh

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds for micro-batches of any size up to the problem's.

    A part of the samples is counted as that part of the work, parameters read included, and a launch: never too much.
    """

    problem: Problem
    is_live: NDArray[np.bool_]
    """Whether a step runs a node."""
    _seconds: dict[int, _Floats] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> Bounds:
        """The bounds of a problem."""
        whole = Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size)
        wanted = (problem.loss,) if problem.train and problem.loss is not None else problem.graph.outputs
        (plan,) = assign_nodes(problem.graph, Placement((whole,)), wanted)
        return Bounds(problem, np.isin(np.arange(len(problem.graph.nodes)), [node for node, _ in plan.nodes]))

    def step_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Seconds that no step can be shorter than: the fullest stage does an equal part of the work at least."""
        return micro_batches * self._work_s(mesh, micro_batches) / mesh.stages

    def divided_s(self, mesh: Mesh, micro_batches: int, stages: Sequence[Sequence[int]]) -> float:
        """The same where it is known which nodes a stage has: all of it in turn, as fast as its devices compute."""
        seconds = self._node_s(mesh, micro_batches)
        return micro_batches * max(float(seconds[list(nodes)].sum()) for nodes in stages)

    def estimate_s(self, mesh: Mesh, micro_batches: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients added up and summed by samples.

        Of stages in a row that take equally long each waits for those before it: p of them take (m + p - 1) / p times
        what the whole model takes of one of m micro-batches.
        """
        rounds = (micro_batches + mesh.stages - 1) / mesh.stages
        names = ((parameter.value.name, 1) for parameter in self.problem.graph.parameters)
        share = state_of(self.problem, names).gradient_bytes / mesh.stages
        added = (micro_batches - 1) * accumulate_per_byte(self.problem.cluster.devices[0]) * share / mesh.width
        group = mesh.groups[0]
        gradients = all_reduce(self.problem.cluster, group).seconds(share) if len(group) > 1 and share else 0.0
        return rounds * self._work_s(mesh, micro_batches) + gradients + added

    def check_memory(self) -> None:
        """Raise InfeasibleError where parameters and their state, shared by all devices, are more than memory holds."""
        problem = self.problem
        names = [parameter.value.name for parameter in problem.graph.parameters]
        least = state_of(problem, ((name, 1) for name in names)).total // problem.cluster.size
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least > problem.memory_of(device):
            raise out_of_memory(problem, [0], 1, device, least, least=True)

    def _work_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Seconds of one micro-batch through the whole model, every node shared by a stage's devices."""
        return float(self._node_s(mesh, micro_batches).sum())

    def _node_s(self, mesh: Mesh, micro_batches: int) -> _Floats:
        problem = self.problem
        parts = mesh.width * micro_batches // problem.micro_batches
        if parts not in self._seconds:
            again = problem.train and problem.recompute == "full"
            kinds = []
            for device in dict.fromkeys(problem.cluster.devices):
                forward, backward = node_seconds(problem.work, device, problem.precision, 1.0 / parts)
                kinds.append(forward * (1 + again) + (backward if problem.train else 0.0))
            self._seconds[parts] = np.where(self.is_live, np.minimum.reduce(kinds), 0.0)
        return self._seconds[parts]
