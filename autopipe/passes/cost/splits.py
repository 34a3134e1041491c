"""Data parallelism inside a stage: every node cut along the axis that counts samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_block
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Split
from autopipe.passes.cost.uses import OpInstance, uses_of


@dataclass(frozen=True, slots=True)
class SampleAxes:
    """A graph with its uses and its batch axes: what every data-parallel stage is cut by.

    `axes[i]` is the axis by which node i is split, None where it carries no samples.
    """

    graph: Graph
    uses: tuple[OpInstance, ...]
    batch: BatchAxes
    axes: tuple[str | None, ...]

    def carries(self, value: str) -> bool:
        """True if replicas share out this value; the others hold it whole."""
        return value in self.batch.values

    def divides(self, node: int, degree: int) -> bool:
        """True if `degree` replicas can share a node's samples in equal blocks."""
        axis = self.axes[node]
        return axis is None or degree == 1 or is_block(self.uses[node].space, axis, degree)

    def splits(self, nodes: Iterable[int], degree: int) -> tuple[tuple[int, tuple[Split, ...]], ...]:
        """Splits that share the samples of `nodes` among `degree` devices; nodes without samples are not split.

        Raises InfeasibleError, naming the node, where an axis cannot be cut into equal blocks.
        """
        if degree == 1:
            return ()
        found = []
        for index in nodes:
            axis = self.axes[index]
            if axis is None:
                continue
            if not self.divides(index, degree):
                raise InfeasibleError(
                    f"{degree} devices cannot share the {self.batch.batch} samples of a micro-batch equally here",
                    hint="choose a micro-batch size that the number of devices divides, or fewer devices",
                    where=repr(self.graph.nodes[index].name),
                )
            found.append((index, (Split(axis, degree),)))
        return tuple(found)


@remembered(GRAPHS)
def sample_axes(graph: Graph) -> SampleAxes:
    """The batch axes of `graph` as stages are cut by them."""
    batch = batch_axes_of(graph)
    return SampleAxes(graph, uses_of(graph), batch, tuple(map(batch.axis, range(len(graph.nodes)))))
