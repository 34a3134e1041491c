"""Gathers whose indices are known and spell a broadcast, as Reshape and Expand.

Attention masks are exported as `mask[batch_index, key_index]` with every index spelt out: a gather over all samples,
in which nothing tells that each sample reads only its own row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from autopipe.ir.dtype import DType
from autopipe.ir.graph import Constant, Graph, Node, Value
from autopipe.passes.frontend.known import Known

GATHERS = frozenset({"Gather", "GatherND"})


def with_plain_gathers(graph: Graph) -> Graph:
    """Replace gathers that read all elements in order, each for a block of results, by Reshape and Expand."""
    if not any(node.op in GATHERS and not node.domain for node in graph.nodes):
        return graph
    known = Known.of(graph)
    taken = {value.name for value in graph.values} | {constant.value.name for constant in graph.constants}
    taken |= {value.name for value in graph.inputs} | {parameter.value.name for parameter in graph.parameters}
    nodes: list[Node] = []
    constants, values = list(graph.constants), list(graph.values)

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    def shape_constant(name: str, shape: tuple[int, ...]) -> str:
        name = free(f"{name}_shape")
        array = np.asarray(shape, dtype=np.int64)
        constants.append(Constant(Value(name, DType.INT64, array.shape), array))
        return name

    for node in graph.nodes:
        apart = _apart(graph, known, node) if node.op in GATHERS and not node.domain else None
        if apart is None:
            nodes.append(node)
            continue
        result = graph.type_of(node.outputs[0])
        if apart == result.shape:
            nodes.append(Node(node.name, "Reshape", (node.inputs[0], shape_constant(result.name, apart)), node.outputs))
            continue
        middle = Value(free(f"{result.name}_apart"), result.dtype, apart)
        values.append(middle)
        reshape = (node.inputs[0], shape_constant(middle.name, apart))
        nodes.append(Node(free(f"{node.name}/apart"), "Reshape", reshape, (middle.name,)))
        expand = (middle.name, shape_constant(result.name, result.shape))
        nodes.append(Node(node.name, "Expand", expand, node.outputs))
    return dataclasses.replace(graph, nodes=tuple(nodes), constants=tuple(constants), values=tuple(values))


def _apart(graph: Graph, known: Known, node: Node) -> tuple[int, ...] | None:
    """The shape under which the data expands to the result; None where the gather is no such thing.

    Parameters are left alone: their gathers are embeddings.
    """
    data, result = graph.type_of(node.inputs[0]), graph.type_of(node.outputs[0])
    if graph.parameter(data.name) is not None or not data.elements:
        return None
    indices = known.array(node.inputs[1])
    if indices is None:
        return None
    places = _places(node, data.shape, indices)
    if places is None or places.shape != result.shape:
        return None
    # A dimension along which nothing changes is broadcast; the others must read all the data, in order.
    moving = tuple(
        extent if extent > 1 and (places.take(0, axis) != places.take(1, axis)).any() else 1
        for axis, extent in enumerate(result.shape)
    )
    if math.prod(moving) != data.elements:
        return None
    expected = np.broadcast_to(np.arange(data.elements).reshape(moving), result.shape)
    return moving if np.array_equal(places, expected) else None


def _places(node: Node, shape: tuple[int, ...], indices: np.ndarray) -> np.ndarray | None:
    """For each element of the result, the row-major position of the element it reads; None where out of range."""
    if node.op == "Gather":
        axis = node.integer("axis") % max(len(shape), 1)
        if indices.size and not (-shape[axis] <= indices.min() and indices.max() < shape[axis]):
            return None
        taken: np.ndarray = np.take(np.arange(math.prod(shape)).reshape(shape), indices, axis=axis)
        return taken
    depth = indices.shape[-1]
    if node.integer("batch_dims") or not indices.size:
        return None
    limits = np.asarray(shape[:depth])
    if (indices < -limits).any() or (indices >= limits).any():
        return None
    strides = [math.prod(shape[axis + 1 :]) for axis in range(depth)]
    starts = ((indices % limits) * np.asarray(strides)).sum(axis=-1)
    rest = shape[depth:]
    inner = np.arange(math.prod(rest)).reshape(rest)
    places: np.ndarray = starts.reshape(*starts.shape, *itertools.repeat(1, len(rest))) + inner
    return places
