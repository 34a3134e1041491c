"""Passes that simplify a graph without changing its results. Each takes linear time.

`cleaned` removes Identity nodes that rename outputs, repeated computations, unread values, and
gathers that only broadcast. Other passes turn a graph that was exported in training mode into one
for inference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from autopipe.ir.graph import DType, Graph, Node
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.elementwise import may_drop_elements
from autopipe.ir.ops.loop import body_of, operand_ports
from autopipe.ir.ops.normalization import uses_batch_statistics
from autopipe.passes.frontend.inference import RANDOM, ConstantFolder
from autopipe.passes.frontend.rewriter import GraphEdit, Rewriter
from autopipe.passes.frontend.uses import VIEWS

_OPERATIONS_PER_INDEX = 8
"""Operations per index that the analysis of a gather with known indices costs."""
GATHERS = frozenset({"Gather", "GatherND"})


STOP_GRADIENT = "StopGradient"
"""Operator of domain `autopipe` that returns its operand and stops the gradient, like `detach`."""
UNPACKING = frozenset({"Unpack", "DequantizeLinear"})
"""Operators that convert packed and quantised parameters."""


def with_plain_gathers(graph: Graph) -> Graph:
    """Return the graph with Reshape and Expand in place of gathers that read all elements in order,
    each for a block of results. Attention masks are exported so: `mask[batch_index, key_index]`.
    """
    if not any(node.op in GATHERS and not node.domain for node in graph.nodes):
        return graph
    known = ConstantFolder(graph)
    edit = GraphEdit(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        is_gather = node.op in GATHERS and not node.domain
        shape = _expanded_shape(graph, known, node) if is_gather else None
        if shape is None:
            nodes.append(node)
            continue
        rewriter = Rewriter(edit, node)
        result = graph.type_of(node.outputs[0])
        source = node.inputs[0]
        op = "Reshape"
        if shape != result.shape:
            op = "Expand"
            middle = edit.free(f"{result.name}_apart")
            operands = [source, edit.shape_operand(middle, shape)]
            title = edit.free(f"{node.name}/apart")
            source = rewriter.add("Reshape", operands, shape, results=[middle], name=title)
        operands = [source, edit.shape_operand(result.name, result.shape)]
        rewriter.add(op, operands, result.shape, result=0, name=node.name)
        nodes.extend(rewriter.nodes)
    return edit.build(nodes)


def with_indices_from_start(graph: Graph) -> Graph:
    """Return the graph with indices that count from the start for each Gather whose indices are
    differences, such as widths of boxes: negative indices count from the end in ONNX, but torch's
    embedding rejects them.
    """
    is_difference = [
        node.op == "Gather" and not node.domain and _is_difference(graph, node.inputs[1])
        for node in graph.nodes
    ]
    if not any(is_difference):
        return graph
    edit = GraphEdit(graph)
    nodes = list[Node]()
    for node, may_be_negative in zip(graph.nodes, is_difference, strict=True):
        if not may_be_negative:
            nodes.append(node)
            continue
        rewriter = Rewriter(edit, node)
        indices = graph.type_of(node.inputs[1])
        data = graph.type_of(node.inputs[0])
        numbers = (0, data.shape[node.integer("axis") % len(data.shape)])
        zero, size = (
            edit.constant(f"{indices.name}_{each}", np.asarray(each, indices.dtype.value))
            for each in numbers
        )
        steps = (
            ("negative", "Less", [indices.name, zero], DType.BOOL),
            ("moved", "Add", [indices.name, size], indices.dtype),
        )
        negative, moved = (
            rewriter.add(
                op,
                operands,
                indices.shape,
                dtype=dtype,
                results=[edit.free(f"{indices.name}_{title}")],
                name=edit.free(f"{node.name}/{title}"),
            )
            for title, op, operands, dtype in steps
        )
        places = rewriter.add(
            "Where",
            [negative, moved, indices.name],
            indices.shape,
            dtype=indices.dtype,
            results=[edit.free(f"{indices.name}_places")],
            name=edit.free(f"{node.name}/places"),
        )
        nodes.extend(rewriter.nodes)
        nodes.append(dataclasses.replace(node, inputs=(node.inputs[0], places)))
    return edit.build(nodes)


def _is_difference(graph: Graph, name: str) -> bool:
    """True if a Sub or Neg writes a value, seen through reshapes, transposes and casts."""
    while (index := graph.producer(name)) is not None and not graph.nodes[index].domain:
        node = graph.nodes[index]
        if node.op not in VIEWS:
            return node.op in ("Neg", "Sub")
        name = node.inputs[0]
    return False


def _expanded_shape(graph: Graph, known: ConstantFolder, node: Node) -> tuple[int, ...] | None:
    """Return the shape from which the data of a gather expand to its result; None if the gather
    cannot be replaced by a Reshape and an Expand.

    Gathers from parameters are embeddings and are kept.
    """
    data = graph.type_of(node.inputs[0])
    result = graph.type_of(node.outputs[0])
    if graph.parameter(data.name) is not None or not data.elements:
        return None
    indices = known.array(node.inputs[1])
    if indices is None or not known.inference.operations.takes(
        _OPERATIONS_PER_INDEX * indices.size
    ):
        return None
    found = _rows(node, data.shape, indices)
    if found is None:
        return None
    before, rows, after = found
    if (*before, *rows.shape, *after) != result.shape:
        return None
    if not result.elements:
        return (1,) * len(result.shape) if data.elements == 1 else None
    shape = _range_shape(rows, data.elements // (math.prod(before) * math.prod(after)))
    return None if shape is None else (*before, *shape, *after)


def _range_shape(rows: np.ndarray, count: int) -> tuple[int, ...] | None:
    """Return the shape in which the integers 0 … count − 1, in order, broadcast to `rows`, an array
    that is not empty; None if there is none.
    """
    if rows.size < count:
        return None
    # Along a broadcast dimension the row is constant; the other dimensions read all rows in order.
    shape = tuple(
        size if size > 1 and (rows.take(0, axis) != rows.take(1, axis)).any() else 1
        for axis, size in enumerate(rows.shape)
    )
    if math.prod(shape) != count:
        return None
    expected = np.broadcast_to(np.arange(count).reshape(shape), rows.shape)
    return shape if np.array_equal(rows, expected) else None


def _rows(
    node: Node, shape: tuple[int, ...], indices: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...]] | None:
    """Return (before, rows, after) of a gather from data with `shape`: the dimensions before and
    after those that the indices address, and the number of the row that each index reads.

    A row is the part of the data that one index reads; rows are counted in row-major order. None if
    an index is out of range, and for gathers that cannot be a broadcast.
    """
    if node.op == "Gather":
        axis = node.integer("axis") % max(len(shape), 1)
        limits = shape[axis : axis + 1]
        columns = indices[..., None]
    else:
        if node.integer("batch_dims") or not indices.size:
            return None
        axis = 0
        limits = shape[: indices.shape[-1]]
        columns = indices
    # A broadcast reads all rows. This also excludes row numbers that are too large for numpy.
    if math.prod(limits) > max(columns.size, 1):
        return None
    rows: np.ndarray | None = None
    for position, limit in enumerate(limits):
        column = columns[..., position]
        if column.size and not -limit <= column.min() <= column.max() < limit:
            return None
        column = column % limit
        column *= math.prod(limits[position + 1 :])
        rows = column if rows is None else rows + column
    assert rows is not None
    return shape[:axis], rows, shape[axis + len(limits) :]


def with_late_weights(graph: Graph) -> Graph:
    """Return the graph with the nodes that unpack or dequantise parameters moved right before the
    first node that reads them. Files often have all of these nodes at the beginning, and then all
    unpacked weights would be in memory at once.
    """
    held = (
        {each.value.name for each in graph.parameters}
        | {each.value.name for each in graph.constants}
        | {""}
    )
    waiting: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        is_unpacking = node.op in UNPACKING or not waiting.keys().isdisjoint(node.inputs)
        if (
            is_unpacking
            and all(name in held or name in waiting for name in node.inputs)
            and len(node.outputs) == 1
        ):
            waiting[node.outputs[0]] = node
            continue
        nodes.extend(_take(waiting, node.inputs))
        nodes.append(node)
    nodes.extend(_take(waiting, graph.outputs))
    return with_nodes(graph, nodes) if tuple(nodes) != graph.nodes else graph


def _take(waiting: dict[str, Node], names: Iterable[str]) -> list[Node]:
    """Remove the nodes that the values `names` depend on from `waiting`, which maps results to
    nodes; return them in topological order.
    """
    found: list[Node] = []
    stack = [name for name in names if name in waiting]
    while stack:
        node = waiting.get(stack[-1])
        before = [] if node is None else [name for name in node.inputs if name in waiting]
        if node is not None and not before:
            found.append(waiting.pop(stack[-1]))
        if node is None or not before:
            stack.pop()
        stack.extend(before)
    return found


def cleaned(graph: Graph) -> Graph:
    """Return an equivalent graph with fewer nodes. Parameters that an output depends on are
    unchanged.
    """
    plain = with_indices_from_start(with_plain_gathers(with_named_outputs(graph)))
    return with_late_weights(without_unread(without_repeats(merged_constants(plain))))


def with_nodes(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """Return the graph with other nodes, which write values whose types the graph has."""
    nodes = tuple(nodes)
    values = tuple(graph.type_of(name) for node in nodes for name in node.outputs if name)
    return dataclasses.replace(graph, nodes=nodes, values=values)


def _reading(node: Node, names: dict[str, str]) -> Node:
    """Return the node with operand `names[x]` in place of each operand x of `names`."""
    if names.keys().isdisjoint(node.inputs):
        return node
    return dataclasses.replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))


def with_named_outputs(graph: Graph) -> Graph:
    """Return the graph without Identity nodes that only name an output: the node that computes the
    value writes the output itself.
    """
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        source = node.inputs[0] if node.inputs else ""
        movable = (
            graph.producer(source) is not None and source not in results and source not in names
        )
        if node.op == "Identity" and not node.domain and node.outputs[0] in results and movable:
            names[source] = node.outputs[0]
        else:
            kept.append(node)
    if not names:
        return graph
    return with_nodes(
        graph,
        (
            dataclasses.replace(
                _reading(node, names), outputs=tuple(names.get(name, name) for name in node.outputs)
            )
            for node in kept
        ),
    )


def without_repeats(graph: Graph) -> Graph:
    """Return the graph with one of several nodes with equal operator, operands and attributes.
    Operators that draw random numbers are kept.
    """
    first: dict[object, Node] = {}
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        node = _reading(node, names)
        key = (node.domain, node.op, node.inputs, node.attributes, tuple(map(bool, node.outputs)))
        earlier = (
            first.setdefault(key, node) if node.op not in RANDOM and node.body is None else node
        )
        if earlier is node or not results.isdisjoint(node.outputs):
            kept.append(node)
        else:
            names.update(zip(node.outputs, earlier.outputs, strict=True))
    return with_nodes(graph, kept)


def merged_constants(graph: Graph) -> Graph:
    """Return the graph whose nodes read one of several equal constants. Parameters are not
    merged.
    """
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    for constant in graph.constants:
        key = (constant.value.dtype, constant.value.shape, constant.array.tobytes())
        kept = first.setdefault(key, constant.value.name)
        if kept != constant.value.name:
            names[constant.value.name] = kept
    return dataclasses.replace(graph, nodes=tuple(_reading(node, names) for node in graph.nodes))


def without_unread(graph: Graph) -> Graph:
    """Return the graph without nodes, parameters and constants on which no output depends."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            node = node if node.body is None else _read_results(node, needed)
            kept.append(node)
            needed.update(node.inputs)
            needed.discard("")  # The name of an absent operand.
    return dataclasses.replace(
        with_nodes(graph, reversed(kept)),
        parameters=tuple(
            parameter for parameter in graph.parameters if parameter.value.name in needed
        ),
        constants=tuple(constant for constant in graph.constants if constant.value.name in needed),
    )


def _read_results(loop: Node, needed: set[str]) -> Node:
    """Return a loop without the states and results that are not needed. `needed` has the names of
    values that nodes after the loop, or the graph's outputs, read.
    """
    body = body_of(loop)
    states = loop.integer("states")
    names = [value.name for value in body.inputs]
    kept = {index for index, name in enumerate(loop.outputs) if name in needed}
    while True:
        smaller = without_unread(
            dataclasses.replace(body, outputs=tuple(body.outputs[index] for index in sorted(kept)))
        )
        read = {*smaller.outputs, *(name for node in smaller.nodes for name in node.inputs)}
        if not (more := {index for index in range(states) if names[1 + index] in read} - kept):
            break
        kept |= more
    if len(kept) == len(body.outputs) and smaller.nodes == body.nodes:
        return dataclasses.replace(
            loop, outputs=tuple(name if name in needed else "" for name in loop.outputs)
        )
    read |= {names[0], *(names[1 + index] for index in kept if index < states)}
    operands = zip(operand_ports(loop), loop.inputs, strict=True)
    scan_inputs = [
        index
        for index, name in enumerate(names[1 + states :][: len(loop.integers("scan_axes"))])
        if name in read
    ]
    scan_outputs = sorted(index - states for index in kept if index >= states)
    kept_of_kind = {"scan": scan_inputs, "gather": scan_outputs}
    attributes = dict(loop.attributes) | {"states": len(kept) - len(scan_outputs)}
    for title, indices in kept_of_kind.items():
        for key in (f"{title}_axes", f"{title}_directions"):
            attributes[key] = tuple(loop.integers(key)[index] for index in indices)
    return dataclasses.replace(
        loop,
        inputs=tuple(name for port, name in operands if port.name in read),
        outputs=tuple(
            name if name in needed else ""
            for index, name in enumerate(loop.outputs)
            if index in kept
        ),
        attributes=tuple(sorted(attributes.items())),
        body=dataclasses.replace(
            smaller, inputs=tuple(value for value in smaller.inputs if value.name in read)
        ),
    )


def at_inference(graph: Graph) -> Graph:
    """Return the graph without Dropout, and with BatchNormalization by running statistics; the
    graph itself if it has neither.
    """
    return _without_batch_statistics(without_dropout(graph))


def without_dropout(graph: Graph) -> Graph:
    """Return the graph without Dropout nodes that drop elements; the graph itself if there are
    none. A Dropout whose mask is used stays, with is_test=1.
    """
    names: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        if node.op != "Dropout" or node.domain or not may_drop_elements(signature_of(graph, node)):
            kept.append(node)
        elif any(_is_used(graph, name) for name in node.outputs[1:]):
            kept.append(
                dataclasses.replace(node, inputs=node.inputs[:2], attributes=(("is_test", 1),))
            )
        elif node.outputs[0] in graph.outputs:
            kept.append(Node(node.name, "Identity", node.inputs[:1], node.outputs[:1]))
        else:
            names[node.outputs[0]] = names.get(node.inputs[0], node.inputs[0])
    if tuple(kept) == graph.nodes:
        return graph
    return without_unread(with_nodes(graph, (_reading(node, names) for node in kept)))


def without_idle_stops(graph: Graph, trains: bool = True) -> Graph:
    """Return the graph without StopGradient nodes that stop no gradient: their operand depends on
    no trained parameter, or the graph is not trained (`trains` is False). A Where that selects
    between a value and the same value with stopped gradient is removed, too. Return the graph
    itself if nothing changes.
    """
    if not any(node.op == STOP_GRADIENT for node in graph.nodes):
        return graph
    # Values computed from trained parameters.
    computed = (
        {each.value.name for each in graph.parameters if each.trainable} if trains else set[str]()
    )
    names: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        if not computed.isdisjoint(node.inputs):
            computed.update(node.outputs)
        if node.op == STOP_GRADIENT and node.inputs[0] not in computed:
            same = node.inputs[0]
        elif node.op == "Where" and names and (choice := _only_choice(graph, node, names)):
            same = choice
        else:
            kept.append(node)
            continue
        if node.outputs[0] in graph.outputs:
            kept.append(Node(node.name, "Identity", (same,), node.outputs))
        else:
            names[node.outputs[0]] = names.get(same, same)
    if tuple(kept) == graph.nodes:
        return graph
    return without_unread(with_nodes(graph, (_reading(node, names) for node in kept)))


def _only_choice(graph: Graph, node: Node, names: Mapping[str, str]) -> str:
    """Return the value of a Where that selects between two copies of one value, after `names`
    replaced its operands; "" if the two values differ, or if the Where broadcasts them.
    """
    first, second = (names.get(each, each) for each in node.inputs[1:])
    is_same = first == second and graph.type_of(first).shape == graph.type_of(node.outputs[0]).shape
    return first if is_same else ""


def _without_batch_statistics(graph: Graph) -> Graph:
    """Return the graph with each BatchNormalization in training mode turned into one by running
    statistics, unless the graph uses the new statistics.
    """
    kept: list[Node] = []
    for node in graph.nodes:
        is_plain = (
            node.op != "BatchNormalization"
            or node.domain
            or not uses_batch_statistics(signature_of(graph, node))
        )
        if is_plain or any(_is_used(graph, name) for name in node.outputs[1:3]):
            kept.append(node)
        else:
            settings = tuple(each for each in node.attributes if each[0] != "training_mode")
            kept.append(dataclasses.replace(node, outputs=node.outputs[:1], attributes=settings))
    return graph if tuple(kept) == graph.nodes else with_nodes(graph, kept)


def _is_used(graph: Graph, name: str) -> bool:
    return bool(name) and (name in graph.consumers() or name in graph.outputs)
