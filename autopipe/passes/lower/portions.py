"""True if a stage may take a micro-batch in portions: only if that leaves what is computed as it is."""

from __future__ import annotations

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.space import AxisKind
from autopipe.passes.frontend.read import mixing_nodes
from autopipe.passes.lower.shared_samples import check_shareable
from autopipe.passes.lower.sizes import stage_micro_batches

_APART = (AxisKind.PARALLEL, AxisKind.MEAN, AxisKind.WHOLE)
"""Samples that are kept apart, and equal shares whose means average to the mean of all."""


def check_portions(graph: Graph, placement: Placement) -> None:
    """Raise InfeasibleError where micro-batches of a stage's own would change what is computed.

    Batch statistics and sums over samples depend on how many samples are together, a mean of equal shares does not; and
    what passes between stages of different micro-batches must keep its samples apart.
    """
    turns = stage_micro_batches(graph, placement)
    if set(turns) == {1}:
        return
    batch = batch_axes_of(graph)
    together = {node.name for node in (*mixing_nodes(graph), *_adding_nodes(graph, batch))}
    for index, (stage, times) in enumerate(zip(placement.stages, turns, strict=True)):
        mixed = next((graph.nodes[node] for node in stage.nodes if graph.nodes[node].name in together), None)
        if times > 1 and mixed is not None:
            raise InfeasibleError(
                f"stage {index} would compute something else on micro-batches of {stage.micro_batch_size} samples "
                f"than on the step's of {stage.micro_batch_size * times}: {mixed.op} {mixed.name!r} mixes samples",
                hint="give this stage the largest micro-batches of all, or all stages equal ones",
            )
    sizes = [stage.micro_batch_size for stage in placement.stages]
    for name, source, target in crossing_values(graph, placement):
        check_shareable(graph, batch, name, sizes[source], sizes[target])


def _adding_nodes(graph: Graph, batch: BatchAxes) -> tuple[Node, ...]:
    """The nodes that compute something of all samples together that is no mean."""
    return tuple(
        node
        for node, axes in zip(graph.nodes, batch.nodes, strict=True)
        if any(each.kind not in _APART for each in axes)
    )
