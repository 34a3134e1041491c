"""Definitions of all operators: iteration space, floating-point operations, tensors saved for
backward, and properties that planning passes use.

Each module defines one operator family, except `operator`, which contains the class of definitions,
and `unsupported`, which lists operators without a definition and the reasons for this.

These modules may import the rest of `ir`.
"""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.equality import node_labels
from autopipe.ir.graph import Graph, Node
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
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
    "OPERATORS",
    "Operator",
    "Signature",
    "is_label_loss",
    "operator_of",
    "operators_with",
    "qualified_name",
    "signature_of",
    "space_of",
    "spaces_of",
]
_FAMILY_MODULES = (
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
OPERATORS.update(
    (row.name, row) for family in _FAMILY_MODULES for row in family.OPERATOR_DEFINITIONS
)


def operator_of(node: Node) -> Operator | None:
    """Return the definition of a node's operator, or None if the operator is not supported."""
    return OPERATORS.get(qualified_name(node))


def operators_with(fact: Callable[[Operator], object]) -> frozenset[str]:
    """Return the names of the operators for which `fact`, a function of the definition, is true.
    The names are keys of `OPERATORS`.
    """
    return frozenset(name for name, row in OPERATORS.items() if fact(row))


def is_label_loss(node: Node) -> bool:
    """Return True if a node computes a loss of class labels (see `Operator.loss`)."""
    row = operator_of(node)
    return row is not None and row.loss


def space_of(graph: Graph, node: Node) -> Space:
    """Return the iteration space of a node. Raise KeyError if its operator is not supported."""
    return OPERATORS[qualified_name(node)].space(signature_of(graph, node))


@memoize(MAX_CACHED_GRAPHS)
def spaces_of(graph: Graph) -> Callable[[int], Space]:
    """Return a function from the index of a node to its iteration space. The spaces are computed at
    the first use and shared by equal nodes. The function raises KeyError for a node whose operator
    is not supported.
    """
    labels = node_labels(graph)
    known = dict[int, Space]()

    def space(node: int) -> Space:
        label = labels[node]
        if label not in known:
            known[label] = space_of(graph, graph.nodes[node])
        return known[label]

    return space
