"""Equality of nodes and of subgraphs of a graph.

Passes that compute results once for equal nodes or equal subgraphs use these two definitions:

- Two *nodes* are equal if their operators, attributes and loop bodies are equal, and if their
  corresponding operands and results have equal kinds, element types, shapes and, for constants,
  elements. `node_labels` numbers the nodes such that equal nodes have equal numbers.
- Two *subgraphs* are equal if their corresponding nodes are equal, and if their wiring is equal:
  two operands or results of one subgraph are one value if, and only if, the corresponding two of
  the other subgraph are one value. `subgraph_key` returns a key that is equal for equal subgraphs.

Neither names nor the data of parameters are compared. `autopipe.ir.repeats` searches for equal
ranges of nodes. It compares the wiring without parameters, because the code of a layer has its
parameters as arguments.

A pass whose result depends on further properties, such as costs, layouts, gradients or devices,
compares them in addition to these definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize


@memoize(MAX_CACHED_GRAPHS)
def node_labels(
    graph: Graph, compared_elements: int | None = None, compare_results: bool = True
) -> tuple[int, ...]:
    """Return a number for each node of the graph. Two nodes have equal numbers if, and only if,
    they are equal, as the module's docstring defines.

    The elements of a constant are compared if it has at most `compared_elements` elements, or if
    `compared_elements` is None. The kind of a value is trained parameter, buffer, constant or
    other value. If `compare_results` is False, nodes can be equal whose numbers of results differ,
    because only one of them has an optional result.
    """
    known: dict[Hashable, int] = {}
    described: dict[str, Hashable] = {"": None}
    labels = []
    for node in graph.nodes:
        names = (*node.inputs, *(node.outputs if compare_results else ()))
        for name in names:
            if name not in described:
                described[name] = _describe(graph, name, compared_elements)
        key = (
            node.domain,
            node.op,
            node.attributes,
            None if node.body is None else node.body.digest(),
            len(node.inputs),
            tuple([described[name] for name in names]),
        )
        labels.append(known.setdefault(key, len(known)))
    return tuple(labels)


def _describe(graph: Graph, name: str, compared_elements: int | None) -> Hashable:
    """Return the properties of the value `name` that equal nodes have in common. See
    `node_labels`.
    """
    value = graph.type_of(name)
    kind = "value"
    content: Hashable = None
    parameter = graph.parameter(name)
    constant = graph.constant(name)
    if parameter is not None:
        kind = "trained parameter" if parameter.trainable else "buffer"
    elif constant is not None:
        kind = "constant"
        if compared_elements is None or value.elements <= compared_elements:
            content = constant.array.dtype.str, constant.array.tobytes()
    return kind, value.dtype.name, value.shape, content


def subgraph_key(
    nodes: Iterable[tuple[Hashable, Sequence[str]]], describe: Callable[[str], Hashable]
) -> tuple[Hashable, ...]:
    """Return a key of a subgraph. Two subgraphs have equal keys if, and only if, they have equally
    many nodes, corresponding nodes have equal labels, and corresponding values have equal
    descriptions and equal wiring.

    `nodes` are pairs (label of a node, names of the values that it reads and writes). Nodes with
    equal labels must have equally many names. `describe` returns the description of a value that
    the caller compares. "" stands for an absent value, which has no description.
    """
    numbers = {"": 0}
    key: list[Hashable] = []
    for label, names in nodes:
        key.append(label)
        for name in names:
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = len(numbers)
                key += number, describe(name)
            else:
                key.append(number)
    return tuple(key)
