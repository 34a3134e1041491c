"""One row an operator: iteration space, operations, what backward keeps. May import the rest of
`ir`.

This module has all rows; the families stand in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from autopipe.ir.graph import Graph, Node
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import (
    attention,
    elementwise,
    experts,
    linear_cross_entropy,
    loop,
    matmul_conv,
    movement,
    normalization,
    quantized,
)
from autopipe.ir.ops.operator import OPERATORS, Operator, Signature, qualified_name, signature_of
from autopipe.ir.space import Space

__all__ = [
    "OPERATORS", "Operator", "Signature", "operator_of", "qualified_name", "signature_of", "space_of", "spaces_of",
]  # fmt: skip
_FAMILIES = (
    attention,
    elementwise,
    experts,
    linear_cross_entropy,
    loop,
    movement,
    normalization,
    matmul_conv,
    quantized,
)
OPERATORS.update((row.name, row) for family in _FAMILIES for row in family.ROWS)


def operator_of(node: Node) -> Operator | None:
    """The row of a node's operator, or None where it is not supported."""
    return OPERATORS.get(qualified_name(node))


def space_of(graph: Graph, node: Node) -> Space:
    """The iteration space of one node of a graph; the operator must have a row."""
    return OPERATORS[qualified_name(node)].space(signature_of(graph, node))


def use_keys(graph: Graph) -> tuple[Hashable, ...]:
    """For each node what its use of its operator is made of: equal keys, equal spaces and
    operations. Those are operator, attributes, body, the types of its tensors, and constants among
    them.
    """
    constants = {
        each.value.name: (each.array.dtype.str, each.array.tobytes()) for each in graph.constants
    }

    def types(names: tuple[str, ...]) -> Hashable:
        found = (graph.type_of(name) if name else None for name in names)
        return tuple([value and (value.dtype.name, value.shape) for value in found])

    return tuple(
        (
            qualified_name(node),
            node.attributes,
            node.body and node.body.digest(),
            types(node.inputs),
            types(node.outputs),
            tuple([constants.get(name) for name in node.inputs]),
        )
        for node in graph.nodes
    )


@remembered(GRAPHS)
def spaces_of(graph: Graph) -> Callable[[int], Space]:
    """A function to the spaces of one graph's nodes by index; equal uses have one. The operator
    must have a row.
    """
    keys = use_keys(graph)
    known = dict[Hashable, Space]()

    def space(node: int) -> Space:
        if keys[node] not in known:
            known[keys[node]] = space_of(graph, graph.nodes[node])
        return known[keys[node]]

    return space
