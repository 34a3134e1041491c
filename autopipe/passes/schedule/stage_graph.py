"""What a scheduler needs of a placement: the DAG of stages and the devices of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, stage_edges
from autopipe.ir.problem import Problem


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Stages numbered topologically: each edge leads from a smaller to a larger index."""

    devices: int
    """Devices of the cluster; some may have no stage."""
    stage_devices: tuple[tuple[int, ...], ...]
    """The device group of each stage."""
    edges: tuple[tuple[int, int], ...]
    """(source, target), sorted, each once."""

    @staticmethod
    def of(problem: Problem, placement: Placement) -> StageGraph:
        """The stage graph of a placement on the problem's cluster."""
        return StageGraph(
            problem.cluster.size,
            tuple(stage.devices for stage in placement.stages),
            stage_edges(problem.graph, placement),
        )

    @property
    def depth(self) -> int:
        """Stages on the longest path."""
        return max(depths_to_end(len(self.stage_devices), self.edges), default=0)


def depths_to_end(stages: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """For each stage the number of stages on the longest path from it to an end, itself included.

    A chain of p stages gives p, ..., 1.
    """
    depths = [1] * stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)


def require_equal_micro_batches(scheduler: str, problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError unless all stages run the problem's micro-batches."""
    for index, stage in enumerate(placement.stages):
        if stage.micro_batch_size != problem.micro_batch_size:
            raise InfeasibleError(
                f"{scheduler} runs all stages on equal micro-batches, but stage {index} has {stage.micro_batch_size} "
                f"samples a micro-batch where the step has {problem.micro_batch_size}",
                hint="choose a strategy that leaves micro-batches alone",
            )
