"""A placement as schedulers see it: the DAG of stages and the devices of each."""

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
    """(source, target), sorted, each once; both ends in one pipeline."""
    pipelines: tuple[int, ...] = ()
    """The pipeline of each stage; () where there is but one."""
    turns: tuple[int, ...] = ()
    """Micro-batches that each stage runs for one of the problem's; () where all stages run those of the problem."""

    @staticmethod
    def of(problem: Problem, placement: Placement) -> StageGraph:
        """The stage graph of a placement on the problem's cluster.

        Raises InfeasibleError where a stage's micro-batches are no equal parts of the problem's.
        """
        return StageGraph(
            problem.cluster.size,
            tuple(stage.devices for stage in placement.stages),
            stage_edges(problem.graph, placement),
            pipelines_of(placement),
            micro_batch_ratios(placement, problem.micro_batch_size),
        )

    @property
    def depth(self) -> int:
        """Stages on the longest path."""
        return max(depths_to_end(len(self.stage_devices), self.edges), default=0)

    @property
    def pipeline_count(self) -> int:
        """Number of pipelines that take micro-batches in turn."""
        return 1 + max(self.pipelines, default=0)

    def micro_batch_ratio_at(self, stage: int) -> int:
        """Micro-batches that a stage runs for one of the problem's."""
        return self.turns[stage] if self.turns else 1

    def sharing(self, stage: int, micro_batch: int, other: int) -> range:
        """The micro-batches of another stage that have samples of a stage's micro-batch."""
        return sharing(micro_batch, self.micro_batch_ratio_at(stage), self.micro_batch_ratio_at(other))

    def micro_batches_of(self, stage: int, micro_batches: int) -> range:
        """The micro-batches that a stage runs where the problem has `micro_batches`.

        Of several pipelines, m runs on pipeline m mod their number; there is but one where stages take turns.
        """
        if self.turns:
            return range(micro_batches * self.turns[stage])
        first = self.pipelines[stage] if self.pipelines else 0
        return range(first, micro_batches, self.pipeline_count)


def pipelines_of(placement: Placement) -> tuple[int, ...]:
    """The pipeline of each stage; () where there is but one."""
    return tuple(stage.pipeline for stage in placement.stages) if placement.pipelines > 1 else ()


def micro_batch_ratios(placement: Placement, micro_batch_size: int) -> tuple[int, ...]:
    """Micro-batches that each stage runs for one of `micro_batch_size` samples; () where it is one for each.

    Number n of a stage with micro-batches of b samples has the step's samples from n * b on, b of them. Raises
    InfeasibleError where one does not divide `micro_batch_size`, or where several pipelines have different ones.
    """
    sizes = tuple(stage.micro_batch_size for stage in placement.stages)
    for index, size in enumerate(sizes):
        if micro_batch_size % size:
            raise InfeasibleError(
                f"stage {index} has micro-batches of {size} samples, which do not divide those of {micro_batch_size}"
            )
    if set(sizes) <= {micro_batch_size}:
        return ()
    if placement.pipelines > 1:
        raise InfeasibleError(
            f"stages have micro-batches of {min(sizes)} and {micro_batch_size} samples, but with several pipelines "
            "all have to have the same"
        )
    return tuple(micro_batch_size // size for size in sizes)


def sharing(number: int, turns: int, other_turns: int) -> range:
    """The numbers of the `other_turns` parts of something that meet part `number` of its `turns`, both counted on."""
    return range(number * other_turns // turns, -(-(number + 1) * other_turns // turns))


def depths_to_end(stages: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """For each stage the number of stages on the longest path from it to an end, itself included.

    A chain of p stages gives p, ..., 1.
    """
    depths = [1] * stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)
