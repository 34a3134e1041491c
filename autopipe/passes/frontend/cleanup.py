"""Passes that simplify a graph.

`clean_graph` does not change results: it removes Identity nodes that only rename outputs, repeated
computations, unread values, and gathers that only broadcast. `convert_to_inference` turns a graph
that was exported in training mode into a graph for inference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from autopipe.ir.graph import DType, Graph, Node
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.elementwise import may_drop_elements
from autopipe.ir.ops.loop import loop_body, operand_ports
from autopipe.ir.ops.normalization import uses_batch_statistics
from autopipe.passes.frontend.inference import RANDOM, ConstantFolder
from autopipe.passes.frontend.rewriter import GraphEdit, Rewriter
from autopipe.passes.frontend.uses import VIEWS

_OPERATIONS_PER_INDEX = 8
"""Number of operations that the analysis of a gather costs per index. They are subtracted from the
number of operations that may be used to evaluate constants.
"""
GATHERS = frozenset({"Gather", "GatherND"})


STOP_GRADIENT = "StopGradient"
"""Operator of the domain `autopipe` that returns its operand and passes no gradient to it, like
torch's `detach`.
"""
UNPACKING = frozenset({"Unpack", "DequantizeLinear"})
"""Operators that convert packed or quantised parameters to floating-point values."""


def replace_broadcast_gathers(graph: Graph) -> Graph:
    """Return the graph in which Reshape and Expand replace each Gather and GatherND that only
    broadcasts its data.

    A row is the part of the data that one index reads; rows are numbered from 0. A gather only
    broadcasts if its indices are constants and read the rows in the order of their numbers, where
    each row may be repeated along some dimensions of the indices. Exporters write attention masks
    like this: `mask[batch_index, key_index]`. Gathers from parameters are not replaced.
    """
    if not any(node.op in GATHERS and not node.domain for node in graph.nodes):
        return graph
    known = ConstantFolder(graph)
    edit = GraphEdit(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        is_gather = node.op in GATHERS and not node.domain
        shape = _shape_before_expand(graph, known, node) if is_gather else None
        if shape is None:
            nodes.append(node)
            continue
        rewriter = Rewriter(edit, node)
        result = graph.type_of(node.outputs[0])
        source = node.inputs[0]
        op = "Reshape"
        if shape != result.shape:
            op = "Expand"
            middle = edit.unique_name(f"{result.name}_apart")
            operands = [source, edit.shape_operand(middle, shape)]
            title = edit.unique_name(f"{node.name}/apart")
            source = rewriter.add("Reshape", operands, shape, results=[middle], name=title)
        operands = [source, edit.shape_operand(result.name, result.shape)]
        rewriter.add(op, operands, result.shape, result=0, name=node.name)
        nodes.extend(rewriter.nodes)
    return edit.build(nodes)


def make_indices_nonnegative(graph: Graph) -> Graph:
    """Return the graph in which each Gather whose indices are differences, for example widths of
    boxes, reads indices that are not negative.

    A difference may be negative. In ONNX, a negative index counts from the end of the axis, but
    torch's embedding rejects it. The added nodes add the size of the axis to negative indices.
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
                results=[edit.unique_name(f"{indices.name}_{title}")],
                name=edit.unique_name(f"{node.name}/{title}"),
            )
            for title, op, operands, dtype in steps
        )
        places = rewriter.add(
            "Where",
            [negative, moved, indices.name],
            indices.shape,
            dtype=indices.dtype,
            results=[edit.unique_name(f"{indices.name}_places")],
            name=edit.unique_name(f"{node.name}/places"),
        )
        nodes.extend(rewriter.nodes)
        nodes.append(dataclasses.replace(node, inputs=(node.inputs[0], places)))
    return edit.build(nodes)


def _is_difference(graph: Graph, name: str) -> bool:
    """True if a Sub or Neg computes the value `name`. Reshapes, transposes, casts and other
    operators of `VIEWS` after it are ignored.
    """
    while (index := graph.producer(name)) is not None and not graph.nodes[index].domain:
        node = graph.nodes[index]
        if node.op not in VIEWS:
            return node.op in ("Neg", "Sub")
        name = node.inputs[0]
    return False


def _shape_before_expand(graph: Graph, known: ConstantFolder, node: Node) -> tuple[int, ...] | None:
    """Return the shape of the Reshape that, followed by an Expand, replaces the gather `node`.
    Returns None if these two operators cannot replace the gather, if its indices are not constant,
    or if their analysis would take more operations than `known` may still use.

    `known` evaluates constants, with a limited number of operations. A gather from a parameter is
    an embedding and is not replaced.
    """
    data = graph.type_of(node.inputs[0])
    result = graph.type_of(node.outputs[0])
    if graph.parameter(data.name) is not None or not data.elements:
        return None
    indices = known.array(node.inputs[1])
    if indices is None or not known.inference.operations.spend(
        _OPERATIONS_PER_INDEX * indices.size
    ):
        return None
    found = _addressed_rows(node, data.shape, indices)
    if found is None:
        return None
    before, rows, after = found
    if (*before, *rows.shape, *after) != result.shape:
        return None
    if not result.elements:
        return (1,) * len(result.shape) if data.elements == 1 else None
    shape = _shape_of_broadcast_range(rows, data.elements // (math.prod(before) * math.prod(after)))
    return None if shape is None else (*before, *shape, *after)


def _shape_of_broadcast_range(rows: np.ndarray, count: int) -> tuple[int, ...] | None:
    """Return the shape with which the integers 0 … count − 1, in order, broadcast to the array
    `rows`, which must not be empty. Returns None if they do not broadcast to it.
    """
    if rows.size < count:
        return None
    # The row number is constant along a broadcast dimension. The other dimensions count every row
    # in order.
    shape = tuple(
        size if size > 1 and (rows.take(0, axis) != rows.take(1, axis)).any() else 1
        for axis, size in enumerate(rows.shape)
    )
    if math.prod(shape) != count:
        return None
    expected = np.broadcast_to(np.arange(count).reshape(shape), rows.shape)
    return shape if np.array_equal(rows, expected) else None


def _addressed_rows(
    node: Node, shape: tuple[int, ...], indices: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...]] | None:
    """Return (before, rows, after) for a gather with known `indices` from data of shape `shape`.

    - before, after: the dimensions before and after the dimensions that the indices address.
    - rows: an array with the number of the row that each index reads. A row is the part of the data
      that one index reads; rows are numbered in row-major order.

    Returns None if an index is out of range, or if the gather cannot be a broadcast: if it has
    `batch_dims`, or fewer indices than rows.
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
    # A broadcast reads every row at least once, so a gather with fewer indices than rows is not a
    # broadcast. This test also rejects row numbers that numpy cannot represent.
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


def move_unpacking_to_readers(graph: Graph) -> Graph:
    """Return the graph in which nodes that unpack or dequantise parameters directly precede the
    first node that reads their results.

    Files often begin with all of these nodes. All unpacked weights would then be in memory at the
    same time.
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
        nodes.extend(_pop_dependencies(waiting, node.inputs))
        nodes.append(node)
    nodes.extend(_pop_dependencies(waiting, graph.outputs))
    return replace_nodes(graph, nodes) if tuple(nodes) != graph.nodes else graph


def _pop_dependencies(waiting: dict[str, Node], names: Iterable[str]) -> list[Node]:
    """Remove from `waiting` the nodes on which the values `names` depend, and return them in
    topological order. `waiting` maps the name of a result to the node that writes it.
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


def clean_graph(graph: Graph) -> Graph:
    """Return an equivalent graph after the passes that every graph goes through. They replace
    gathers that only broadcast, make indices non-negative, drop Identity nodes before outputs,
    merge equal constants and nodes, remove unread nodes, and move unpacking right before its use.
    Parameters that an output depends on are unchanged.
    """
    plain = make_indices_nonnegative(replace_broadcast_gathers(drop_output_identities(graph)))
    return move_unpacking_to_readers(remove_unread(merge_equal_nodes(merge_equal_constants(plain))))


def replace_nodes(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """Return the graph with `nodes` in place of its nodes. The graph must already have the types of
    the values that `nodes` write.
    """
    nodes = tuple(nodes)
    values = tuple(graph.type_of(name) for node in nodes for name in node.outputs if name)
    return dataclasses.replace(graph, nodes=nodes, values=values)


def _rename_operands(node: Node, names: dict[str, str]) -> Node:
    """Return the node with each operand x that is a key of `names` replaced by `names[x]`."""
    if names.keys().isdisjoint(node.inputs):
        return node
    return dataclasses.replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))


def drop_output_identities(graph: Graph) -> Graph:
    """Return the graph without Identity nodes that only give a value the name of an output. The
    node that computes the value writes the output itself.
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
    return replace_nodes(
        graph,
        (
            dataclasses.replace(
                _rename_operands(node, names),
                outputs=tuple(names.get(name, name) for name in node.outputs),
            )
            for node in kept
        ),
    )


def merge_equal_nodes(graph: Graph) -> Graph:
    """Return the graph with only the first of several nodes with equal operators, operands and
    attributes. Nodes that draw random numbers, loops, and nodes that write an output are not
    removed.
    """
    first: dict[object, Node] = {}
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        node = _rename_operands(node, names)
        key = (node.domain, node.op, node.inputs, node.attributes, tuple(map(bool, node.outputs)))
        earlier = (
            first.setdefault(key, node) if node.op not in RANDOM and node.body is None else node
        )
        if earlier is node or not results.isdisjoint(node.outputs):
            kept.append(node)
        else:
            names.update(zip(node.outputs, earlier.outputs, strict=True))
    return replace_nodes(graph, kept)


def merge_equal_constants(graph: Graph) -> Graph:
    """Return the graph in which, of several equal constants, nodes read only the first. Parameters
    are not merged.
    """
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    for constant in graph.constants:
        key = (constant.value.dtype, constant.value.shape, constant.array.tobytes())
        kept = first.setdefault(key, constant.value.name)
        if kept != constant.value.name:
            names[constant.value.name] = kept
    return dataclasses.replace(
        graph, nodes=tuple(_rename_operands(node, names) for node in graph.nodes)
    )


def remove_unread(graph: Graph) -> Graph:
    """Return the graph without nodes, parameters and constants on which no output depends. This
    includes states and results of loops.
    """
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            node = node if node.body is None else _prune_loop(node, needed)
            kept.append(node)
            needed.update(node.inputs)
            # The empty name denotes an absent operand and no value, so no node is needed for it.
            needed.discard("")
    return dataclasses.replace(
        replace_nodes(graph, reversed(kept)),
        parameters=tuple(
            parameter for parameter in graph.parameters if parameter.value.name in needed
        ),
        constants=tuple(constant for constant in graph.constants if constant.value.name in needed),
    )


def _prune_loop(loop: Node, needed: set[str]) -> Node:
    """Return the node `loop` without the states and results that nothing needs. `needed` contains
    the names of values that are outputs of the graph or that nodes after the loop read.
    """
    body = loop_body(loop)
    states = loop.integer("states")
    names = [value.name for value in body.inputs]
    kept = {index for index, name in enumerate(loop.outputs) if name in needed}
    while True:
        smaller = remove_unread(
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


def convert_to_inference(graph: Graph) -> Graph:
    """Return the graph for inference: without Dropout, and with running statistics in each
    BatchNormalization. Returns the graph itself if nothing changes.
    """
    return _use_running_statistics(remove_dropout(graph))


def remove_dropout(graph: Graph) -> Graph:
    """Return the graph without Dropout nodes that drop elements; the graph itself if there are
    none. A Dropout whose mask is used is not removed, but drops no elements (`is_test` = 1).
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
    return remove_unread(replace_nodes(graph, (_rename_operands(node, names) for node in kept)))


def remove_idle_stops(graph: Graph, trains: bool = True) -> Graph:
    """Return the graph without StopGradient nodes that do not stop a gradient; the graph itself if
    it is unchanged.

    A StopGradient does not stop a gradient if its operand depends on no trained parameter, or if
    the graph is not trained (`trains` is False). A `Where` that then selects between two copies of
    one value is also removed.
    """
    if not any(node.op == STOP_GRADIENT for node in graph.nodes):
        return graph
    # Names of values through which a gradient can flow: trained parameters, and all values that are
    # computed from trained parameters.
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
        elif node.op == "Where" and names and (choice := _common_choice(graph, node, names)):
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
    return remove_unread(replace_nodes(graph, (_rename_operands(node, names) for node in kept)))


def _common_choice(graph: Graph, node: Node, names: Mapping[str, str]) -> str:
    """Return the value that the node, a `Where`, always returns: the value of both operands, if
    they are one value and the node does not broadcast it; otherwise "". `names` maps names of
    operands to the values that replace them.
    """
    first, second = (names.get(each, each) for each in node.inputs[1:])
    is_same = first == second and graph.type_of(first).shape == graph.type_of(node.outputs[0]).shape
    return first if is_same else ""


def _use_running_statistics(graph: Graph) -> Graph:
    """Return the graph in which each BatchNormalization in training mode uses its running
    statistics. A node whose updated statistics are read is unchanged.
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
    return graph if tuple(kept) == graph.nodes else replace_nodes(graph, kept)


def _is_used(graph: Graph, name: str) -> bool:
    """True if a node or an output reads the value `name`. False for the name "" of an absent
    result.
    """
    return bool(name) and (name in graph.consumers() or name in graph.outputs)
