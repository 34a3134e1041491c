"""Lower bound and estimate of a factorisation, before any of its stages is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.cost.memory import State, state_of
from autopipe.passes.cost.memory_check import out_of_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.placement.grid.degrees import Degrees


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds for micro-batches of any size up to the problem's.

    A part of the samples is counted as that part of the work, parameters read included, and a launch: never too much.
    """

    problem: Problem
    chunks: int
    """Stages of each group."""
    is_live: NDArray[np.bool_]
    """True if a step runs a node."""
    state: State
    """Of all parameters, on one device."""
    _seconds: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, chunks: int) -> Bounds:
        """The bounds of a problem, for `chunks` stages a group."""
        whole = Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size)
        wanted = (problem.loss,) if problem.train and problem.loss is not None else problem.graph.outputs
        (plan,) = assign_nodes(problem.graph, Placement((whole,)), wanted)
        is_live = np.isin(np.arange(len(problem.graph.nodes)), [node for node, _ in plan.nodes])
        state = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters))
        return Bounds(problem, chunks, is_live, state)

    def check_memory(self, degrees: Degrees) -> None:
        """Raise InfeasibleError where parameters and their state, shared out equally, are more than memory holds."""
        problem, state = self.problem, self.state
        copies = degrees.data if problem.optimizer.shard else 1
        parts = degrees.pipeline * degrees.tensor
        least = (state.parameter_bytes + state.gradient_bytes + state.optimizer_bytes // copies) // parts
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least > problem.memory_of(device):
            raise out_of_memory(problem, [0], degrees.pipeline, device, least, least=True)

    def estimate_s(self, degrees: Degrees, size: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients summed.

        Of p groups in a line each waits for those before it: they take (m + p - 1) / p times what the whole model takes
        of one of m micro-batches; with v stages a group the p - 1 are v times shorter.
        """
        filling = (degrees.pipeline - 1) / self.chunks
        rounds = (self.problem.batch_size / size + filling) / degrees.pipeline
        share = self.state.gradient_bytes / degrees.pipeline / degrees.tensor
        replicas = degrees.groups()[0][:: degrees.tensor]
        return rounds * self._work_s(degrees, size) + exchange_of_gradients(self.problem, replicas).seconds(share)

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
