"""What random data for an input must keep to, read off the places it goes."""

from __future__ import annotations

from autopipe.ir.graph import Graph, Node
from autopipe.ir.program import InputRange

_PASSING = frozenset(
    [
        "Cast",
        "Concat",
        "Expand",
        "Flatten",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
    ]
)
"""Operators whose result holds the same numbers."""
_MASK_LIMIT = 2
"""A whole number that indexes nothing is a mask: 0 or 1."""


def input_ranges(graph: Graph) -> tuple[InputRange, ...]:
    """One entry a graph input: indices stay below the rows of the table they index, labels below the classes."""
    consumers = graph.consumers()
    batch_axes = dict(graph.batch_axes)
    found = []
    for value in graph.inputs:
        below = None
        if not value.dtype.is_floating:
            below = min(_limits(graph, value.name, consumers, set()), default=_MASK_LIMIT)
        found.append(InputRange(value, batch_axes.get(value.name), below))
    return tuple(found)


def _limits(graph: Graph, name: str, consumers: dict[str, tuple[int, ...]], seen: set[str]) -> list[int]:
    if name in seen:
        return []
    seen.add(name)
    found: list[int] = []
    for index in consumers.get(name, ()):
        node = graph.nodes[index]
        limit = _limit_at(graph, node, name)
        if limit is not None:
            found.append(limit)
        elif node.op in _PASSING and not graph.type_of(node.outputs[0]).dtype.is_floating:
            found.extend(_limits(graph, node.outputs[0], consumers, seen))
        else:
            shift = _shift(graph, node, name)
            rest = _limits(graph, node.outputs[0], consumers, seen) if shift is not None else []
            found.extend(max(limit - (shift or 0), 1) for limit in rest)
    return found


def _shift(graph: Graph, node: Node, name: str) -> int | None:
    """How far an Add or Sub of known numbers moves `name` up at most; None for other nodes."""
    if node.op not in ("Add", "Sub") or (node.op == "Sub" and node.inputs[0] != name):
        return None
    constant = graph.constant(node.inputs[1] if node.inputs[0] == name else node.inputs[0])
    if constant is None or not constant.array.size or not constant.value.dtype.is_integer:
        return None
    return int(constant.array.max()) if node.op == "Add" else -int(constant.array.min())


def _limit_at(graph: Graph, node: Node, name: str) -> int | None:
    if node.op in ("Gather", "GatherElements", "ScatterElements") and node.inputs[1] == name:
        shape = graph.type_of(node.inputs[0]).shape
        return shape[node.integer("axis")] if shape else None
    if node.op == "GatherND" and node.inputs[1] == name:
        depth = graph.type_of(name).shape[-1]
        first = node.integer("batch_dims")
        return min(graph.type_of(node.inputs[0]).shape[first : first + depth])
    if node.op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and node.inputs[1] == name:
        return graph.type_of(node.inputs[0]).shape[1]
    if node.op == "OneHot" and node.inputs[0] == name:
        depth_constant = graph.constant(node.inputs[1])
        return None if depth_constant is None else int(depth_constant.array.reshape(-1)[0])
    return None
