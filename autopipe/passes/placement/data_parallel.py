"""Strategy `data_parallel`: one stage on all devices. Each device computes an equal number of the
samples of every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import (
    BATCH_AXIS,
    ResolvedConstraint,
    resolve_constraints,
)
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import (
    check_single_stage_devices,
    check_state_fits,
    with_required_recomputation,
)
from autopipe.passes.sharding.regions import check_samples_divide, single_stage_placement


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Strategy `data_parallel`: replicate the model on all devices and all-reduce the gradients
    once per step.
    """

    name: ClassVar[str] = "data_parallel"

    def division(self, graph: Graph) -> Division:
        """Return `Division.FEW`: a single stage needs no pipeline, so large micro-batches are
        preferred.
        """
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError unless all devices may share one stage, divide the samples of a
        micro-batch evenly, and have enough memory for all parameters, their gradients and their
        optimizer state (of which each device stores a fraction if it is sharded).
        """
        check_single_stage_devices(problem, self.name)
        check_state_fits(problem, problem.cluster.size, 1)
        check_samples_divide(problem, problem.cluster.size, self.name, "devices")

    def run(self, problem: Problem) -> Placement:
        """Return a placement with one stage that runs all nodes on all devices. The stage
        recomputes its forward if the problem requires it, or permits it and memory does not suffice
        otherwise.

        Raise InfeasibleError if the samples of a node cannot be divided evenly among the devices,
        or if memory does not suffice. Raise ConfigurationError for a constraint that this placement
        violates.
        """
        samples = sample_axes(problem.graph)
        devices = problem.cluster.size
        for each in resolve_constraints(problem):
            reason = ""
            if each.constraint.stage not in (None, 0):
                reason = (
                    f"requires stage {each.constraint.stage}, but data_parallel has stage 0 only"
                )
            elif each.devices is not None and set(each.devices) != set(range(devices)):
                reason = (
                    "requires a subset of the devices, but data_parallel uses all for each node"
                )
            elif not _permits_sample_split(each, samples, devices):
                reason = (
                    "requires a split other than the samples over "
                    f"{devices} {plural(devices, 'device')}"
                )
            if reason:
                raise ConfigurationError(
                    f"{each} {reason}", hint="use strategy manual, which follows all constraints"
                )
        return with_required_recomputation(
            problem,
            single_stage_placement(
                problem, samples.splits(range(len(problem.graph.nodes)), devices)
            ),
        )


def _permits_sample_split(resolved: ResolvedConstraint, samples: SampleAxes, size: int) -> bool:
    """True if the constraint `resolved` is satisfied by splitting the samples of its nodes over
    `size` devices, and nothing else. A constraint without a split is satisfied.
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
