"""A file's own functions, put in place of their calls: a few that call each other twice spell a huge graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from autopipe.ir.errors import ModelError

if TYPE_CHECKING:
    import onnx

Key = tuple[str, str, str]
"""Domain, name and overload of a function."""
MOST_NODES = 100_000
"""Nodes that functions may become: several times a large export's."""
MOST_BYTES = 1 << 28
"""Bytes that functions' nodes may become."""
DEEPEST = 64
"""Functions that may call one another in a row."""


class Extent(NamedTuple):
    """The size of a call when nothing in it is a call any more."""

    nodes: int
    bytes: int
    depth: int


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions of its own. Raises ModelError where that cannot be, or becomes too large."""
    import onnx.checker
    import onnx.inliner

    if not model.functions:
        return model
    _require_bounded(model)
    try:
        return onnx.inliner.inline_local_functions(model)
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(f"its functions cannot be inlined: {str(error).splitlines()[0]}") from error


def _require_bounded(model: onnx.ModelProto) -> None:
    """Raise ModelError, naming the call, where functions call one another for too long or become too much."""
    functions = {(function.domain, function.name, function.overload): function for function in model.functions}
    extents: dict[Key, Extent] = {}
    nodes = size = 0
    for call in _nodes_within(model.graph.node):
        if _key(call) not in functions:
            continue
        where = f"{call.op_type} {call.name!r}"
        _measure(_key(call), functions, extents, where)
        nodes, size = nodes + extents[_key(call)].nodes, size + extents[_key(call)].bytes
        if nodes > MOST_NODES or size > MOST_BYTES:
            raise ModelError(
                f"the file's functions become more than {MOST_NODES} nodes or {MOST_BYTES >> 20} MiB when inlined",
                where=where,
            )


def _measure(first: Key, functions: Mapping[Key, onnx.FunctionProto], extents: dict[Key, Extent], where: str) -> None:
    """Fill in the extent of a call of `first` and of those that it leads to."""
    if first in extents:
        return
    path = {first: _called(functions[first], functions)}
    while path:
        key = next(reversed(path))
        callee = next((each for each in path[key] if each not in extents), None)
        if callee is None:
            extents[key] = _extent(functions[key], extents)
            if extents[key].depth > DEEPEST:
                raise ModelError(f"more than {DEEPEST} of the file's functions call one another in a row", where=where)
            del path[key]
        elif callee in path:
            name = f"{callee[0]}::{callee[1]}"
            raise ModelError(f"its functions cannot be inlined: {name!r} calls itself", where=where)
        else:
            path[callee] = _called(functions[callee], functions)


def _called(function: onnx.FunctionProto, functions: Mapping[Key, onnx.FunctionProto]) -> Iterator[Key]:
    return (key for key in map(_key, _nodes_within(function.node)) if key in functions)


def _extent(function: onnx.FunctionProto, extents: dict[Key, Extent]) -> Extent:
    """The extent of a call of `function`; those of the functions that it calls are there."""
    nodes = list(_nodes_within(function.node))
    called = [extents[key] for key in map(_key, nodes) if key in extents]
    return Extent(
        len(nodes) + sum(each.nodes for each in called),
        # Every level puts its own mark before the names inside.
        function.ByteSize() + sum(each.bytes + each.nodes * 2 * len(function.name) for each in called),
        1 + max((each.depth for each in called), default=0),
    )


def _key(node: onnx.NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


def _nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of the graphs that they hold."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in itertools.chain((attribute.g,) if attribute.HasField("g") else (), attribute.graphs):
                yield from _nodes_within(graph.node)
