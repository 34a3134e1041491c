"""One stage on all devices, each with an equal share of every micro-batch's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import BATCH_AXIS, ResolvedConstraint, resolved_constraints
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_state, fitted


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Replicates the whole model on every device and sums gradients once a step."""

    name: ClassVar[str] = "data_parallel"

    def division(self, graph: Graph) -> Division:
        """It makes one stage."""
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError unless devices of one kind share a micro-batch equally and can hold the weights."""
        check_one_kind(problem, self.name)
        check_state(problem, problem.cluster.size, 1)
        devices, samples = problem.cluster.size, problem.micro_batch_size
        if devices > 1 and not problem.graph.batch_axes:
            raise InfeasibleError(
                f"data_parallel cannot share samples among {devices} devices: no input of the model carries any",
                hint="say which axis of each input counts samples in model.batch_axes, or choose another strategy",
            )
        if samples % devices:
            raise InfeasibleError(
                f"data_parallel cannot share a micro-batch of {samples} samples equally among {devices} devices",
                hint=f"choose a micro-batch size that {devices} divides, fewer devices, or another strategy",
            )

    def run(self, problem: Problem) -> Placement:
        """One stage. Raises InfeasibleError where a node's samples cannot be shared or memory does not hold it."""
        nodes = tuple(range(len(problem.graph.nodes)))
        devices = tuple(range(problem.cluster.size))
        samples = sample_axes(problem.graph)
        for wish in resolved_constraints(problem):
            self._obey(wish, samples, devices)
        recompute = problem.train and problem.recompute == "full"
        splits = samples.splits(nodes, len(devices))
        return fitted(problem, Placement((Stage(nodes, devices, problem.micro_batch_size, splits, recompute),)))

    def _obey(self, wish: ResolvedConstraint, samples: SampleAxes, devices: tuple[int, ...]) -> None:
        """Raise ConfigurationError for a constraint that one stage on all devices does not fulfil."""
        reason = ""
        if wish.constraint.stage not in (None, 0):
            reason = f"asks for stage {wish.constraint.stage}, and data_parallel has stage 0 alone"
        elif wish.devices is not None and set(wish.devices) != set(devices):
            reason = "asks for some of the devices, and data_parallel uses all for every node"
        elif not self._is_by_samples(wish, samples, len(devices)):
            reason = f"asks for another split than of the samples by {len(devices)}"
        if reason:
            raise ConfigurationError(f"{wish} {reason}", hint="strategy manual follows any constraint")

    def _is_by_samples(self, wish: ResolvedConstraint, samples: SampleAxes, size: int) -> bool:
        """True if a wish for a split, if it is one, is for that of the samples by all devices."""
        split = wish.constraint.split
        if split is None or size == 1:
            return all(degree == 1 for _, degree in split or ())
        if not split:
            return all(samples.axes[node] is None for node in wish.nodes)
        return all(
            degree == size and (axis == BATCH_AXIS or all(samples.axes[node] == axis for node in wish.nodes))
            for axis, degree in split
        )
