"""Each node with its operator's row, its iteration space and its operations; equal uses are worked out once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of, qualified_name, signature_of, use_keys
from autopipe.ir.ops.operator import Operator
from autopipe.ir.space import Space


@dataclass(frozen=True, slots=True)
class OpInstance:
    """One use of an operator. `flops` are those of one forward evaluation of the whole node."""

    row: Operator
    space: Space
    flops: float


@remembered(GRAPHS)
def uses_of(graph: Graph) -> tuple[OpInstance, ...]:
    """The use that each node makes of its operator, in the order of the nodes.

    Nodes that agree in operator, attributes, tensor types and constants share one `OpInstance`: equal layers are
    worked out once a layer's kind. Raises ModelError for an operator without a row.
    """
    known: dict[Hashable, OpInstance] = {}
    found = []
    for node, key in zip(graph.nodes, use_keys(graph), strict=True):
        use = known.get(key)
        if use is None:
            use = known[key] = _use(graph, node)
        found.append(use)
    return tuple(found)


def _use(graph: Graph, node: Node) -> OpInstance:
    row = operator_of(node)
    if row is None:
        raise ModelError(f"operator {qualified_name(node)} is not supported", where=repr(node.name))
    signature = signature_of(graph, node)
    space = row.space(signature)
    return OpInstance(row, space, row.flops(signature, space))
