"""What a factorisation takes at least, and about, before any of its stages is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.fit import out_of_memory
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.replicas import exchange_of_gradients
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.lower.stages import assign_nodes
from autopipe.passes.placement.grid.degrees import Degrees


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds for micro-batches of any size up to the problem's.

    A part of the samples is counted as that part of the work, parameters read included, and a launch: never too much.
    """

    problem: Problem
    is_live: NDArray[np.bool_]
    """Whether a step runs a node."""
    state_bytes: int
    gradient_bytes: int
    _seconds: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> Bounds:
        """The bounds of a problem."""
        whole = Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size)
        wanted = (problem.loss,) if problem.train and problem.loss is not None else problem.graph.outputs
        (plan,) = assign_nodes(problem.graph, Placement((whole,)), wanted)
        is_live = np.isin(np.arange(len(problem.graph.nodes)), [node for node, _ in plan.nodes])
        state = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters))
        return Bounds(problem, is_live, state.total, state.gradient_bytes)

    def check_memory(self) -> None:
        """Raise InfeasibleError where parameters and their state, shared by all devices, are more than memory holds."""
        problem = self.problem
        least = self.state_bytes // problem.cluster.size
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least > problem.memory_of(device):
            raise out_of_memory(problem, [0], 1, device, least, least=True)

    def step_s(self, degrees: Degrees, size: int) -> float:
        """Seconds that no step can be shorter than: the fullest group does an equal part of the work at least."""
        return self._micro_batches(size) * self._work_s(degrees, size) / degrees.pipeline

    def estimate_s(self, degrees: Degrees, size: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients summed.

        Of p groups in a line each waits for those before it: they take (m + p - 1) / p times what the whole model takes
        of one of m micro-batches.
        """
        rounds = (self._micro_batches(size) + degrees.pipeline - 1) / degrees.pipeline
        share = self.gradient_bytes / degrees.pipeline / degrees.tensor
        replicas = degrees.groups()[0][:: degrees.tensor]
        return rounds * self._work_s(degrees, size) + exchange_of_gradients(self.problem, replicas).seconds(share)

    def _micro_batches(self, size: int) -> int:
        return self.problem.batch_size // size

    def _work_s(self, degrees: Degrees, size: int) -> float:
        """Seconds of one micro-batch through the whole model, every node shared by a group's devices."""
        problem = self.problem
        parts = degrees.width * problem.micro_batch_size // size
        if parts not in self._seconds:
            again = problem.train and problem.recompute == "full"
            kinds = []
            for device in dict.fromkeys(problem.cluster.devices):
                forward, backward = node_seconds(problem.work, device, problem.precision, 1.0 / parts)
                kinds.append(forward * (1 + again) + (backward if problem.train else 0.0))
            self._seconds[parts] = float(np.where(self.is_live, np.minimum.reduce(kinds), 0.0).sum())
        return self._seconds[parts]
