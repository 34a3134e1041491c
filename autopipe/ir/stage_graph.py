"""What a scheduler needs of a placement: the DAG of stages and the devices of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    """(source, target), sorted, each once; both ends in one pipeline."""
    pipelines: tuple[int, ...] = ()
    """The pipeline of each stage; () where there is but one."""

    @staticmethod
    def of(problem: Problem, placement: Placement) -> StageGraph:
        """The stage graph of a placement on the problem's cluster."""
        return StageGraph(
            problem.cluster.size,
            tuple(stage.devices for stage in placement.stages),
            stage_edges(problem.graph, placement),
            pipelines_of(placement),
        )

    @property
    def depth(self) -> int:
        """Stages on the longest path."""
        return max(depths_to_end(len(self.stage_devices), self.edges), default=0)

    @property
    def pipeline_count(self) -> int:
        """Number of pipelines that take micro-batches in turn."""
        return 1 + max(self.pipelines, default=0)

    def micro_batches_of(self, stage: int, micro_batches: int) -> range:
        """The micro-batches that a stage runs, of `micro_batches` in all: m runs on pipeline m mod their number."""
        first = self.pipelines[stage] if self.pipelines else 0
        return range(first, micro_batches, self.pipeline_count)


def pipelines_of(placement: Placement) -> tuple[int, ...]:
    """The pipeline of each stage; () where there is but one."""
    return tuple(stage.pipeline for stage in placement.stages) if placement.pipelines > 1 else ()


def depths_to_end(stages: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """For each stage the number of stages on the longest path from it to an end, itself included.

    A chain of p stages gives p, ..., 1.
    """
    depths = [1] * stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)
