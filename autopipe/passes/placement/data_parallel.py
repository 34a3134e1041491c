"""One stage on all devices, each with an equal share of every micro-batch's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.splits import sample_axes


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Replicates the whole model on every device and sums gradients once a step."""

    name: ClassVar[str] = "data_parallel"

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError unless the devices share a micro-batch equally."""
        devices, samples = problem.cluster.size, problem.micro_batch_size
        if samples % devices:
            raise InfeasibleError(
                f"data_parallel cannot share a micro-batch of {samples} samples equally among {devices} devices",
                hint=f"choose a micro-batch size that {devices} divides, fewer devices, or another strategy",
            )

    def run(self, problem: Problem) -> Placement:
        """One stage. Raises InfeasibleError where a node's samples cannot be shared."""
        nodes = tuple(range(len(problem.graph.nodes)))
        devices = tuple(range(problem.cluster.size))
        splits = sample_axes(problem.graph).splits(nodes, len(devices))
        recompute = problem.recompute == "full"
        return Placement((Stage(nodes, devices, problem.micro_batch_size, splits, recompute),))
