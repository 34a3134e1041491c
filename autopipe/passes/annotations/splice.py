"""Annotations put between the bytes of a serialised model, of which all others are copied unread, weights included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from autopipe.passes.annotations.protos import annotation_proto, configuration_proto
from autopipe.passes.annotations.sharding import Configuration
from autopipe.passes.frontend.wire import (
    GRAPH_NODE,
    LENGTH,
    MODEL_CONFIGURATION,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    NODE_CONFIGURATION,
    VARINT,
    Field,
    encoded,
    fields_of,
    framed,
    header,
    varint,
)

IR_VERSION: Final = 11
"""The first version of the format that has the annotations."""

Piece = bytes | memoryview


def spliced(data: memoryview, configuration: Configuration) -> Iterator[Piece]:
    """The serialised model `data` with the annotations of `configuration`, piece by piece.

    They take the place of those for as many devices, and of those of the same name.
    """
    fields = list(fields_of(data, 0, len(data)))
    declared = {field.start: _declared(data, field) for field in fields if _is(field, MODEL_CONFIGURATION)}
    replaced = {
        name for name, devices in declared.values() if name == configuration.name or devices == configuration.devices
    }
    versions = [varint(data, field.payload, field.end)[0] for field in fields if field.number == MODEL_IR_VERSION]
    annotations = {
        each.node: framed(NODE_CONFIGURATION, annotation_proto(each, configuration.name).SerializeToString())
        for each in configuration.annotations
    }
    yield encoded(MODEL_IR_VERSION << 3 | VARINT) + encoded(max(IR_VERSION, *versions))
    before = 0
    for field in fields:
        if _is(field, MODEL_GRAPH):
            pieces = list(_graph(data, field, replaced, annotations, before))
            before += sum(_is(part, GRAPH_NODE) for part in fields_of(data, field.payload, field.end))
            yield header(MODEL_GRAPH, sum(map(len, pieces)))
            yield from pieces
        elif field.number != MODEL_IR_VERSION and declared.get(field.start, ("", 0))[0] not in replaced:
            yield data[field.start : field.end]
    yield framed(MODEL_CONFIGURATION, configuration_proto(configuration).SerializeToString())


def _graph(
    data: memoryview, graph: Field, replaced: set[str], annotations: Mapping[int, bytes], before: int
) -> Iterator[Piece]:
    """Contents of the graph's field; `before` nodes stand before its own."""
    position = before
    for part in fields_of(data, graph.payload, graph.end):
        if not _is(part, GRAPH_NODE):
            yield data[part.start : part.end]
            continue
        pieces = [*_node(data, part, replaced), annotations.get(position, b"")]
        position += 1
        yield header(GRAPH_NODE, sum(map(len, pieces)))
        yield from pieces


def _node(data: memoryview, node: Field, replaced: set[str]) -> Iterator[Piece]:
    """Contents of the node's field, without annotations for the configurations `replaced`."""
    for field in fields_of(data, node.payload, node.end):
        if not (_is(field, NODE_CONFIGURATION) and _configuration_id(data, field) in replaced):
            yield data[field.start : field.end]


def _is(field: Field, number: int) -> bool:
    return field.number == number and field.wire == LENGTH


def _declared(data: memoryview, field: Field) -> tuple[str, int]:
    """Name and number of devices of a configuration."""
    import onnx

    found = onnx.DeviceConfigurationProto.FromString(bytes(data[field.payload : field.end]))
    return found.name, found.num_devices


def _configuration_id(data: memoryview, field: Field) -> str:
    import onnx

    message = onnx.NodeDeviceConfigurationProto.FromString(bytes(data[field.payload : field.end]))
    return str(message.configuration_id)
