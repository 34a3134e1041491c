"""Gathers whose indices are known and spell a broadcast, as Reshape and Expand.

Attention masks are exported as `mask[batch_index, key_index]` with every index spelt out: a gather over all samples,
in which nothing tells that each sample reads only its own row.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopipe.ir.graph import Constant, DType, Graph, Node, Value
from autopipe.passes.frontend.known import ConstantFolder

_LOOKS = 8
"""Operations on each index until it is known what a gather spells."""
GATHERS = frozenset({"Gather", "GatherND"})


def with_plain_gathers(graph: Graph) -> Graph:
    """Replace gathers that read all elements in order, each for a block of results, by Reshape and Expand."""
    if not any(node.op in GATHERS and not node.domain for node in graph.nodes):
        return graph
    known = ConstantFolder.of(graph)
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


def _apart(graph: Graph, known: ConstantFolder, node: Node) -> tuple[int, ...] | None:
    """The shape under which the data expands to the result; None where the gather is no such thing.

    Parameters are left alone: their gathers are embeddings.
    """
    data, result = graph.type_of(node.inputs[0]), graph.type_of(node.outputs[0])
    if graph.parameter(data.name) is not None or not data.elements:
        return None
    indices = known.array(node.inputs[1])
    if indices is None or not known.inference.operations.takes(_LOOKS * indices.size):
        return None
    found = _rows(node, data.shape, indices)
    if found is None:
        return None
    before, places, after = found
    if (*before, *places.shape, *after) != result.shape:
        return None
    if not result.elements:
        return (1,) * len(result.shape) if data.elements == 1 else None
    moving = _moving(places, data.elements // (math.prod(before) * math.prod(after)))
    return None if moving is None else (*before, *moving, *after)


def _moving(places: np.ndarray, rows: int) -> tuple[int, ...] | None:
    """The shape under which the numbers from 0 to `rows` in order expand to `places`, which are not empty."""
    if places.size < rows:
        return None
    # A dimension along which nothing changes is broadcast; the others must read all rows, in order.
    moving = tuple(
        extent if extent > 1 and (places.take(0, axis) != places.take(1, axis)).any() else 1
        for axis, extent in enumerate(places.shape)
    )
    if math.prod(moving) != rows:
        return None
    return moving if np.array_equal(places, np.broadcast_to(np.arange(rows).reshape(moving), places.shape)) else None


def _rows(
    node: Node, shape: tuple[int, ...], indices: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...]] | None:
    """Which row each index reads, between the dimensions before and after the rows, which are read whole and in order.

    A row is what one index takes; rows are counted in row-major order. None where an index is out of range.
    """
    if node.op == "Gather":
        axis = node.integer("axis") % max(len(shape), 1)
        limits, places = shape[axis : axis + 1], indices[..., None]
    else:
        if node.integer("batch_dims") or not indices.size:
            return None
        axis, limits, places = 0, shape[: indices.shape[-1]], indices
    if math.prod(limits) > max(places.size, 1):  # Also where the numbers of rows would be too large for numpy.
        return None
    rows: np.ndarray | None = None
    for position, limit in enumerate(limits):
        column = places[..., position]
        if column.size and not -limit <= column.min() <= column.max() < limit:
            return None
        column = column % limit
        column *= math.prod(limits[position + 1 :])
        rows = column if rows is None else rows + column
    assert rows is not None
    return shape[:axis], rows, shape[axis + len(limits) :]
