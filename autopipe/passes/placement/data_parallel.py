"""One stage on all devices, each with an equal share of every micro-batch's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import (
    BATCH_AXIS,
    ResolvedConstraint,
    resolved_constraints,
)
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_one_kind, check_state, fitted
from autopipe.passes.sharding.regions import check_samples, one_stage


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Replicates the whole model on every device and sums gradients once a step."""

    name: ClassVar[str] = "data_parallel"

    def division(self, graph: Graph) -> Division:
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError unless devices of one kind share a micro-batch equally and can hold
        the weights.
        """
        check_one_kind(problem, self.name)
        check_state(problem, problem.cluster.size, 1)
        check_samples(problem, problem.cluster.size, self.name, "devices")

    def run(self, problem: Problem) -> Placement:
        """One stage.

        Raises InfeasibleError where a node's samples cannot be shared or memory does not hold it,
        ConfigurationError for a constraint that one stage on all devices does not fulfil.
        """
        samples = sample_axes(problem.graph)
        devices = problem.cluster.size
        for each in resolved_constraints(problem):
            reason = ""
            if each.constraint.stage not in (None, 0):
                reason = (
                    f"asks for stage {each.constraint.stage}, and data_parallel has stage 0 alone"
                )
            elif each.devices is not None and set(each.devices) != set(range(devices)):
                reason = "asks for some of the devices, and data_parallel uses all for every node"
            elif not _is_by_samples(each, samples, devices):
                reason = f"asks for another split than of the samples by {devices}"
            if reason:
                raise ConfigurationError(
                    f"{each} {reason}", hint="strategy manual follows any constraint"
                )
        return fitted(
            problem, one_stage(problem, samples.splits(range(len(problem.graph.nodes)), devices))
        )


def _is_by_samples(resolved: ResolvedConstraint, samples: SampleAxes, size: int) -> bool:
    """True if what a constraint says of splits, if anything, is that all devices share the
    samples.
    """
    split = resolved.constraint.split
    if split is None or size == 1:
        return all(degree == 1 for _, degree in split or ())
    if not split:
        return all(samples.axes[node] is None for node in resolved.nodes)
    return all(
        degree == size
        and (axis == BATCH_AXIS or all(samples.axes[node] == axis for node in resolved.nodes))
        for axis, degree in split
    )
