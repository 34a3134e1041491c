"""One row an operator: iteration space, operations, what backward keeps.

`operator_named` is the only door; families of rows live in the modules beside this one.
"""

from __future__ import annotations

from autopipe.ir.graph import Graph, Node
from autopipe.ir.ops.row import NotationLine, Operator, Signature, signature_of
from autopipe.ir.ops.table import OPERATORS
from autopipe.ir.space import Space

__all__ = ["OPERATORS", "NotationLine", "Operator", "Signature", "operator_of", "signature_of", "space_of"]


def qualified_name(node: Node) -> str:
    """The operator's name as rows and emitters are keyed: with the domain in front unless it is ONNX's own."""
    return f"{node.domain}.{node.op}" if node.domain not in ("", "ai.onnx") else node.op


def operator_of(node: Node) -> Operator | None:
    """The row of a node's operator, or None where it is not supported."""
    return OPERATORS.get(qualified_name(node))


def space_of(graph: Graph, node: Node) -> Space:
    """The iteration space of one node of a graph; the operator must have a row."""
    return OPERATORS[qualified_name(node)].space(signature_of(graph, node))
