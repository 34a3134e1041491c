"""Graph to graph, meaning kept: aliases of outputs, equal computations, what nothing reads. All linear."""

from __future__ import annotations

import dataclasses

from autopipe.ir.graph import Attribute, Graph, Node, Value
from autopipe.passes.frontend.gathers import with_plain_gathers
from autopipe.passes.frontend.infer import RANDOM


def cleaned(graph: Graph) -> Graph:
    """The same function with fewer nodes; parameters that matter are kept as they are."""
    return without_unread(without_repeats(merged_constants(with_plain_gathers(with_named_outputs(graph)))))


def renamed(graph: Graph, names: dict[str, str]) -> Graph:
    """Read `names[x]` wherever x is read."""
    if not names:
        return graph
    return dataclasses.replace(graph, nodes=tuple(_reading(node, names) for node in graph.nodes))


def _reading(node: Node, names: dict[str, str]) -> Node:
    """The node, reading `names[x]` wherever it read x."""
    if names.keys().isdisjoint(node.inputs):
        return node
    return dataclasses.replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))


def with_named_outputs(graph: Graph) -> Graph:
    """Drop an Identity that only names an output, giving that name to the node that computes it."""
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        source = node.inputs[0] if node.inputs else ""
        movable = graph.producer(source) is not None and source not in results and source not in names
        if node.op == "Identity" and not node.domain and node.outputs[0] in results and movable:
            names[source] = node.outputs[0]
        else:
            kept.append(node)
    if not names:
        return graph
    nodes = tuple(
        dataclasses.replace(
            node,
            inputs=tuple(names.get(name, name) for name in node.inputs),
            outputs=tuple(names.get(name, name) for name in node.outputs),
        )
        for node in kept
    )
    return dataclasses.replace(graph, nodes=nodes, values=values_of(graph, nodes))


def without_repeats(graph: Graph) -> Graph:
    """Keep one of several nodes that compute the same from the same."""
    first: dict[object, Node] = {}
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        node = _reading(node, names)
        key: tuple[str, str, tuple[str, ...], tuple[tuple[str, Attribute], ...], tuple[bool, ...]]
        key = (node.domain, node.op, node.inputs, node.attributes, tuple(map(bool, node.outputs)))
        earlier = first.setdefault(key, node) if node.op not in RANDOM else node
        if earlier is node or not results.isdisjoint(node.outputs):
            kept.append(node)
        else:
            names.update(zip(node.outputs, earlier.outputs, strict=True))
    nodes = tuple(kept)
    return dataclasses.replace(graph, nodes=nodes, values=values_of(graph, nodes))


def merged_constants(graph: Graph) -> Graph:
    """Keep one of several equal constants. Parameters are never merged."""
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    for constant in graph.constants:
        key = (constant.value.dtype, constant.value.shape, constant.array.tobytes())
        kept = first.setdefault(key, constant.value.name)
        if kept != constant.value.name:
            names[constant.value.name] = kept
    return renamed(graph, names)


def without_unread(graph: Graph) -> Graph:
    """Drop nodes, parameters and constants on which no output depends."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs):
            continue
        kept.append(node)
        needed.update(node.inputs)
        needed.discard("")  # An operand that is absent.
    nodes = tuple(reversed(kept))
    return dataclasses.replace(
        graph,
        nodes=nodes,
        values=values_of(graph, nodes),
        parameters=tuple(parameter for parameter in graph.parameters if parameter.value.name in needed),
        constants=tuple(constant for constant in graph.constants if constant.value.name in needed),
    )


def values_of(graph: Graph, nodes: tuple[Node, ...]) -> tuple[Value, ...]:
    """The types of what `nodes` write, all of which `graph` knows."""
    return tuple(graph.type_of(name) for node in nodes for name in node.outputs if name)
