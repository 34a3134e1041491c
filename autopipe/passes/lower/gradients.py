"""Which values gradients flow through."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of


@remembered(GRAPHS)
def differentiable_values(graph: Graph) -> frozenset[str]:
    """Values whose gradient a trainable parameter needs: floating, computed from one through differentiable nodes."""
    found = {parameter.value.name for parameter in graph.parameters if parameter.trainable}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.differentiable and any(name in found for name in node.inputs):
            found.update(name for name in node.outputs if name and graph.type_of(name).dtype.is_floating)
    return frozenset(found)
