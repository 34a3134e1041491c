"""The iteration spaces of a graph's nodes, worked out once for equal uses of an operator."""

from __future__ import annotations

from collections.abc import Hashable

from autopipe.ir.graph import Graph
from autopipe.ir.ops import qualified_name, space_of
from autopipe.ir.space import Space


def use_keys(graph: Graph) -> tuple[Hashable, ...]:
    """For each node what its use of its operator is made of: equal keys, equal spaces and operations.

    Those are operator, attributes, the types of its tensors, and constants among them.
    """
    constants = {each.value.name: (each.array.dtype.str, each.array.tobytes()) for each in graph.constants}
    return tuple(
        (
            qualified_name(node),
            node.attributes,
            tuple([_type(graph, name) for name in node.inputs]),
            tuple([_type(graph, name) for name in node.outputs]),
            tuple([constants.get(name) for name in node.inputs]),
        )
        for node in graph.nodes
    )


class Spaces:
    """The spaces of one graph's nodes by index, each worked out when it is asked for; the operator must have a row."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._keys = use_keys(graph)
        self._known: dict[Hashable, Space] = {}

    def __getitem__(self, node: int) -> Space:
        key = self._keys[node]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = space_of(self._graph, self._graph.nodes[node])
        return found


def _type(graph: Graph, name: str) -> tuple[str, tuple[int, ...]] | None:
    if not name:
        return None
    value = graph.type_of(name)
    return value.dtype.name, value.shape
