"""Repeated layers of a model: equal subgraphs, such as the decoder layers of a GPT or the blocks of
a stage of a ResNet.

A *layer class* is a set of equal subgraphs, its *instances*. Node k of one instance has the
operator, attributes, operand types and result types of node k of every other instance, and the
wiring inside the instances is equal (see `autopipe.ir.repeats`). The names of nodes
and values are not compared. Values of parameters are not compared either. The values of constants
are compared if they are small, because codegen writes them into the source.

The search reads the nodes in an order in which a layer is a range of consecutive nodes. In the
order of a file, computations that all layers share, such as an attention mask or a position bias,
often lie inside the first layer. `_side_branches_first` moves them to the front.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from autopipe.ir.equality import node_labels
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layer_names import DEFAULT_NAME, layer_name
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.ir.repeats import Labels, Repeat, Wiring, find_repeats

_MAX_COMPARED_ELEMENTS: Final = 64
"""Maximum number of elements of a constant whose values must be equal in equal layers."""
_HEAVY_KINDS: Final = frozenset({"matmul", "convolution", "recurrent"})
"""Kinds of operators that do most of the work of a layer (`Operator.kind`)."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """A set of equal subgraphs of a graph, such as the decoder layers of a GPT."""

    instances: tuple[tuple[int, ...], ...]
    """For each instance, its nodes: node k of an instance corresponds to node k of every other one.
    A node is an index in the graph; in a class inside another one, a position in the outer
    instance.
    """
    inner: tuple[LayerClass, ...] = ()
    """Classes inside each instance."""

    @property
    def count(self) -> int:
        """Number of instances."""
        return len(self.instances)

    @property
    def length(self) -> int:
        """Number of nodes of an instance."""
        return len(self.instances[0])


@memoize(MAX_CACHED_GRAPHS)
def find_layers(graph: Graph) -> tuple[LayerClass, ...]:
    """Return the layer classes of a graph in the order of their first instances.

    Each class has two instances or more, and an instance reads a parameter. Instances of different
    classes do not overlap. The result depends only on the order and the structure of the nodes.
    """
    has_parameter = np.array([_reads_parameter(graph, node) for node in graph.nodes], dtype=bool)
    is_heavy = has_parameter & np.array([does_most_work(node) for node in graph.nodes], dtype=bool)
    order = _side_branches_first(graph, is_heavy.tolist())
    labels, wiring = _labels_and_wiring(graph, order)
    repeats = find_repeats(labels, wiring, has_parameter[order], is_heavy[order])
    return tuple(_layer_class(each, order) for each in repeats)


def name_layers(graph: Graph, classes: Sequence[LayerClass]) -> tuple[str, ...]:
    """Return a name for each class, from the names of the parameters that its layers read,
    otherwise from the names of their nodes. Several classes can have one name, for example layers
    with different attention masks; `layer_ranges` numbers their layers together.
    """
    names = []
    for each in classes:
        slots = zip(*each.instances, strict=True)
        nodes = [[graph.nodes[index] for index in indices] for indices in slots]
        operands = (
            operand
            for corresponding in nodes
            for operand in zip(*(node.inputs for node in corresponding), strict=True)
            if graph.parameter(operand[0]) is not None
        )
        name = layer_name(operands)
        if not name:
            name = layer_name([node.name for node in corresponding] for corresponding in nodes)
        names.append(name or DEFAULT_NAME)
    return tuple(names)


def _layer_class(repeat: Repeat, order: Sequence[int]) -> LayerClass:
    """Return the layer class of a repeated part. `order` contains the node at each position of the
    sequence in which the part was found.
    """
    length = repeat.length
    return LayerClass(
        tuple(tuple(order[start : start + length]) for start in repeat.starts),
        tuple(_layer_class(each, range(length)) for each in repeat.inner),
    )


def _reads_parameter(graph: Graph, node: Node) -> bool:
    """True if an operand of the node is a parameter."""
    return any(graph.parameter(name) is not None for name in node.inputs)


def does_most_work(node: Node) -> bool:
    """True for a matmul, a convolution and a recurrent layer."""
    operator = OPERATORS.get(qualified_name(node))
    return operator is not None and operator.kind in _HEAVY_KINDS


def _side_branches_first(graph: Graph, is_heavy: Sequence[bool]) -> list[int]:
    """Return the nodes in a topological order in which computations that layers share precede the
    layers. `is_heavy[i]` is True if node i is a matmul, a convolution or a recurrent layer with a
    parameter, a *heavy* operator.

    A *light* node depends on no heavy operator. The light nodes form connected components: the
    embedding with the first normalization, a mask, a table of rotary positions, a position bias, a
    function of a parameter. Layers share a component if its first reader is no heavy operator, and
    if there is a heavy operator between its first and its last reader. Shared components move to
    the front, and all other nodes keep their order.
    """
    count = len(graph.nodes)
    sources = graph.sources()
    is_light = [True] * count
    for index in range(count):
        is_light[index] = not is_heavy[index] and all(
            is_light[source] for _, source in sources[index]
        )
    component = list(range(count))

    def root(index: int) -> int:
        """Return the node that represents the connected component of a light node."""
        while component[index] != index:
            component[index] = component[component[index]]
            index = component[index]
        return index

    for index in range(count):
        for _, source in sources[index]:
            if is_light[index] and is_light[source]:
                component[root(index)] = root(source)
    first_reader: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    for index in range(count):
        for _, source in sources[index]:
            if is_light[source] and not is_light[index]:
                first_reader.setdefault(root(source), index)
                last_reader[root(source)] = index
    heavy_before = list(itertools.accumulate(is_heavy, initial=0))

    def is_shared(index: int) -> bool:
        """True if several layers share the connected component of the light node, or if only light
        nodes read the component.
        """
        first = first_reader.get(root(index))
        if first is None:
            return True
        last = last_reader[root(index)]
        return not is_heavy[first] and heavy_before[last] > heavy_before[first]

    front = [index for index in range(count) if is_light[index] and is_shared(index)]
    moved = set(front)
    return front + [index for index in range(count) if index not in moved]


def _labels_and_wiring(graph: Graph, order: Sequence[int]) -> tuple[Labels, Wiring]:
    """Return (labels, wiring) of the nodes in `order`. Equal nodes have equal labels
    (`autopipe.ir.equality`); the wiring states which values they read and write.
    """
    labels = np.array(node_labels(graph, _MAX_COMPARED_ELEMENTS), dtype=np.int64)[list(order)]
    numbers = {value.name: -1 - index for index, value in enumerate(graph.inputs)}
    operands: list[tuple[int, ...]] = []
    first_result = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    written = 0
    for index, node in enumerate(graph.nodes[place] for place in order):
        operands.append(tuple(numbers[name] for name in node.inputs if name and name in numbers))
        for name in node.outputs:
            numbers[name] = written
            written += 1
        first_result[index + 1] = written
    return labels, Wiring(operands, first_result)
