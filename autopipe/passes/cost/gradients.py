"""Which values a backward pass computes gradients of."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.passes.cost.uses import Use


def values_with_gradient(graph: Graph, uses: tuple[Use, ...]) -> frozenset[str]:
    """Names of the floating values that are a trainable parameter or computed, differentiably, from one."""
    found = {
        parameter.value.name
        for parameter in graph.parameters
        if parameter.trainable and parameter.value.dtype.is_floating
    }
    for node, use in zip(graph.nodes, uses, strict=True):
        if not use.row.differentiable or found.isdisjoint(node.inputs):
            continue
        found.update(name for name in node.outputs if name and graph.type_of(name).dtype.is_floating)
    return frozenset(found)
