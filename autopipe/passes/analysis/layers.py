"""Repeated layers of a model: equal subgraphs, such as the decoder layers of a GPT or the blocks of
a stage of a ResNet.

A *layer class* is a set of equal subgraphs, its *instances*. Node k of one instance has the
operator, attributes and operand types of node k of every other instance, and the wiring inside the
instances is equal (see `autopipe.ir.repeats`). Names of nodes and values are not compared. Values
of parameters are not compared either. Values of constants are compared if they are small and whole
numbers, such as shapes and axes. Other constants are data like parameters, such as the scales of
quantized weights. Optional results are not compared, since the last layer often lacks the result
that only a next layer would read.

The search reads the nodes in an order in which a layer is a range of consecutive nodes. In the
order of a file, computations that all layers share, such as an attention mask or a position bias,
often lie inside the first layer. `_side_branches_first` moves them to the front.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.equality import node_labels
from autopipe.ir.graph import DType, Graph, Node
from autopipe.ir.layer_names import DEFAULT_NAME, distinct_names, layer_path
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.ir.repeats import Labels, Repeat, Wiring, find_repeats

_MAX_COMPARED_ELEMENTS: Final = 64
"""Maximum number of elements of a constant whose values must be equal in equal layers."""
_COMPARED_TYPES: Final = frozenset({DType.INT32, DType.INT64, DType.BOOL})
"""Types of constants whose values must be equal in equal layers."""
_QUANTIZED_TYPES: Final = frozenset({DType.INT8, DType.UINT8, DType.INT4, DType.UINT4})
"""Types of quantized weights, which are constants."""
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

    Each class has two instances or more, and an instance contains a matmul, a convolution or a
    recurrent layer with a weight. Instances of different classes do not overlap. The result depends
    only on the order and the structure of the nodes.
    """
    labels = _labels(graph)
    weights = _weights(graph)
    is_heavy = np.array(
        [does_most_work(node) and not weights.isdisjoint(node.inputs[:2]) for node in graph.nodes],
        dtype=bool,
    )
    found = _layers_in_order(graph, labels, is_heavy, np.arange(len(graph.nodes)))
    if 2 * _covered_nodes(found) < len(graph.nodes):
        # Optimizers of files can interleave the nodes of parallel branches, such as an encoder and
        # the first layer of its decoder.
        other = _layers_in_order(graph, labels, is_heavy, np.array(_depth_first_order(graph)))
        if 4 * _covered_nodes(other) >= len(graph.nodes):
            found = max(found, other, key=_covered_nodes)
    return tuple(sorted(found, key=lambda each: min(map(min, each.instances))))


def _covered_nodes(classes: Sequence[LayerClass]) -> int:
    """Return the number of nodes that are in instances of the classes."""
    return sum(each.count * each.length for each in classes)


def _layers_in_order(
    graph: Graph, labels: Labels, is_heavy: NDArray[np.bool_], given: NDArray[np.int64]
) -> tuple[LayerClass, ...]:
    """Return the layer classes of a graph whose nodes are read in the order `given`, except that
    shared side branches are first. `labels` and `is_heavy` are in the order of the graph.
    """
    places = _side_branches_first(graph, given.tolist(), is_heavy[given].tolist())
    order = given[places]
    wiring = _wiring(graph, order.tolist())
    repeats = find_repeats(labels[order], wiring, is_heavy[order], is_heavy[order])
    return tuple(
        _layer_class(each, order.tolist())
        for each in repeats
        if not _are_projections(wiring, each, is_heavy[order])
    )


def _are_projections(wiring: Wiring, repeat: Repeat, is_heavy: NDArray[np.bool_]) -> bool:
    """True if each instance has one heavy operator, no instance reads the results of another one,
    and several of them read one value, such as the projections to queries, keys and values. They
    are parts of a layer.
    """
    if is_heavy[repeat.starts[0] : repeat.starts[0] + repeat.length].sum() != 1:
        return False
    own: set[int] = set()
    readers: Counter[int] = Counter()
    for start in repeat.starts:
        stop = start + repeat.length
        written = range(int(wiring.first_result[start]), int(wiring.first_result[stop]))
        read = {value for node in range(start, stop) for value in wiring.operands[node]}
        readers.update(read.difference(written))
        own.update(written)
    return own.isdisjoint(readers) and max(readers.values(), default=0) > 1


def name_layers(graph: Graph, classes: Sequence[LayerClass]) -> tuple[str, ...]:
    """Return a name for each class, from the names of the parameters that its layers read,
    otherwise from the names of the modules of their nodes, otherwise from their operators. Several
    classes can have one name, for example layers with different attention masks; `layer_ranges`
    numbers their layers together.
    """
    names = distinct_names([_path_of_class(graph, each) for each in classes])
    return tuple(
        name or _name_by_operators(graph, each) for name, each in zip(names, classes, strict=True)
    )


def _path_of_class(graph: Graph, layers: LayerClass) -> tuple[str, ...]:
    """Return the path of the modules that contain the layers of a class; () if it is unknown."""
    slots = zip(*layers.instances, strict=True)
    nodes = [[graph.nodes[index] for index in indices] for indices in slots]
    operands = (
        operand
        for corresponding in nodes
        for operand in zip(*(node.inputs for node in corresponding), strict=True)
        if graph.parameter(operand[0]) is not None
    )
    # The last word of a node's name is its operator with a number, and not a module.
    modules = ([node.name.rpartition("/")[0] for node in corresponding] for corresponding in nodes)
    return layer_path(operands) or layer_path(modules)


def _name_by_operators(graph: Graph, layers: LayerClass) -> str:
    """Return the name of layers without known modules: by their heavy operators."""
    kinds = [
        OPERATORS[qualified_name(graph.nodes[index])].kind
        for index in layers.instances[0]
        if does_most_work(graph.nodes[index])
    ]
    if set(kinds) == {"convolution"}:
        return "convolution layer" if len(kinds) == 1 else "convolution block"
    return "recurrent layer" if set(kinds) == {"recurrent"} else DEFAULT_NAME


def _layer_class(repeat: Repeat, order: Sequence[int]) -> LayerClass:
    """Return the layer class of a repeated part. `order` contains the node at each position of the
    sequence in which the part was found.
    """
    length = repeat.length
    return LayerClass(
        tuple(tuple(order[start : start + length]) for start in repeat.starts),
        tuple(_layer_class(each, range(length)) for each in repeat.inner),
    )


def _weights(graph: Graph) -> set[str]:
    """Return the names of the weights: parameters, quantized constants, and functions of weights
    and constants.
    """
    found: set[str] = set()
    others: set[str] = {value.name for value in graph.inputs}
    for node in graph.nodes:
        for name in node.inputs:
            constant = graph.constant(name)
            is_quantized = constant is not None and constant.value.dtype in _QUANTIZED_TYPES
            if is_quantized or graph.parameter(name) is not None:
                found.add(name)
        is_function = others.isdisjoint(node.inputs) and not found.isdisjoint(node.inputs)
        (found if is_function else others).update(filter(None, node.outputs))
    return found


def _depth_first_order(graph: Graph) -> list[int]:
    """Return the nodes in a topological order in which the nodes that only one branch needs are
    consecutive: depth first from the outputs, the operands of a node from first to last. Nodes that
    no output needs are last.
    """
    sources = graph.sources()
    order: list[int] = []
    is_placed = [False] * len(graph.nodes)
    ends = [graph.producer(name) for name in graph.outputs]
    for end in (*ends, *range(len(graph.nodes))):
        waiting = [] if end is None else [end]
        while waiting:
            index = waiting[-1]
            missing = [source for _, source in sources[index] if not is_placed[source]]
            if is_placed[index] or not missing:
                waiting.pop()
                if not is_placed[index]:
                    is_placed[index] = True
                    order.append(index)
            else:
                waiting.append(missing[0])
    return order


def does_most_work(node: Node) -> bool:
    """True for a matmul, a convolution and a recurrent layer."""
    operator = OPERATORS.get(qualified_name(node))
    return operator is not None and operator.kind in _HEAVY_KINDS


def _side_branches_first(graph: Graph, given: Sequence[int], is_heavy: Sequence[bool]) -> list[int]:
    """Return the places of the topological order `given` in another topological order, in which
    computations that layers share precede the layers. `is_heavy[i]` is True if the node at place i
    is a matmul, a convolution or a recurrent layer with a weight, a *heavy* operator.

    A *light* node depends on no heavy operator. The light nodes form connected components: the
    embedding with the first normalization, a mask, a table of rotary positions, a position bias, a
    function of a parameter. Layers share a component if there is a heavy operator between its first
    and its last reader, unless it is the input of the first layer: it depends on an input of the
    graph, and its first reader is a heavy operator. Shared components move to
    the front, and all other nodes keep their order.
    """
    count = len(graph.nodes)
    place_of = {node: place for place, node in enumerate(given)}
    every = graph.sources()
    sources = [[place_of[source] for _, source in every[node]] for node in given]
    is_light = [True] * count
    for index in range(count):
        is_light[index] = not is_heavy[index] and all(is_light[source] for source in sources[index])
    component = list(range(count))

    def root(index: int) -> int:
        """Return the node that represents the connected component of a light node."""
        while component[index] != index:
            component[index] = component[component[index]]
            index = component[index]
        return index

    for index in range(count):
        for source in sources[index]:
            if is_light[index] and is_light[source]:
                component[root(index)] = root(source)
    inputs = {value.name for value in graph.inputs}
    of_inputs = {
        root(index)
        for index in range(count)
        if is_light[index] and not inputs.isdisjoint(graph.nodes[given[index]].inputs)
    }
    first_reader: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    for index in range(count):
        for source in sources[index]:
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
        is_side_branch = not is_heavy[first] or root(index) not in of_inputs
        return is_side_branch and heavy_before[last] > heavy_before[first]

    front = [index for index in range(count) if is_light[index] and is_shared(index)]
    moved = set(front)
    return front + [index for index in range(count) if index not in moved]


def _labels(graph: Graph) -> Labels:
    """Return a number for each node. Nodes that can correspond in equal layers have equal
    numbers.
    """
    known: dict[Hashable, int] = {}
    pairs = zip(graph.nodes, node_labels(graph, 0, compare_results=False), strict=True)
    keys = ((label, _compared_values(graph, node)) for node, label in pairs)
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _wiring(graph: Graph, order: Sequence[int]) -> Wiring:
    """Return the values that the nodes in `order` read and write."""
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
    return Wiring(operands, first_result)


def _compared_values(graph: Graph, node: Node) -> tuple[bytes, ...]:
    """Return the values of the constants of a node that must be equal in equal layers."""
    constants = (constant for name in node.inputs if (constant := graph.constant(name)) is not None)
    return tuple(
        constant.array.tobytes()
        for constant in constants
        if constant.value.dtype in _COMPARED_TYPES
        and constant.value.elements <= _MAX_COMPARED_ELEMENTS
    )
