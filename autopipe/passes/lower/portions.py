"""Whether a stage may take a micro-batch in portions: only if that leaves what is computed as it is."""

from __future__ import annotations

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.placement import Placement
from autopipe.ir.space import AxisKind
from autopipe.passes.frontend.mixing import mixing_nodes
from autopipe.passes.lower.sizes import stage_turns

_APART = (AxisKind.PARALLEL, AxisKind.MEAN, AxisKind.WHOLE)
"""Samples that are kept apart, and equal shares whose means average to the mean of all."""


def check_portions(graph: Graph, placement: Placement) -> None:
    """Raise InfeasibleError for a stage with smaller micro-batches than the step's that would compute something else.

    Batch statistics and sums over samples depend on how many samples are together; a mean of equal shares does not.
    """
    turns = stage_turns(graph, placement)
    if set(turns) == {1}:
        return
    together = {node.name: node for node in (*mixing_nodes(graph), *_adding_nodes(graph))}
    for index, (stage, times) in enumerate(zip(placement.stages, turns, strict=True)):
        mixed = next((graph.nodes[node] for node in stage.nodes if graph.nodes[node].name in together), None)
        if times > 1 and mixed is not None:
            raise InfeasibleError(
                f"stage {index} would compute something else on micro-batches of {stage.micro_batch_size} samples "
                f"than on the step's of {stage.micro_batch_size * times}: {mixed.op} {mixed.name!r} mixes samples",
                hint="give this stage the largest micro-batches of all, or all stages equal ones",
            )


def _adding_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that compute something of all samples together that is no mean."""
    samples = batch_axes_of(graph).nodes
    return tuple(
        node for node, axes in zip(graph.nodes, samples, strict=True) if any(each.kind not in _APART for each in axes)
    )
