"""Separation of an ONNX file into the model and the data of its weights, without the protobuf
library.

Only the framing is parsed (https://protobuf.dev/programming-guides/encoding): field numbers, wire
types and lengths. All bytes except the data of large tensors are copied, and the protobuf parser
checks them later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import FileSlice, VarintSlice
from autopipe.ir.state_names import is_for_state_only

LARGE_FLOATS = 1024
"""Minimum bytes of a floating-point tensor whose data are not copied."""
LARGE_TABLE = 16 << 20
"""Minimum bytes of tensors of other types whose data are not copied. Smaller tensors may be needed
to infer shapes.
"""
VARINT = 0
FIXED64 = 1
LENGTH = 2
FIXED32 = 5
MODEL_IR_VERSION = 1
MODEL_GRAPH = 7
MODEL_CONFIGURATION = 26
GRAPH_NODE = 1
GRAPH_INITIALIZER = 5
NODE_OUTPUT = 2
NODE_OPERATOR = 4
NODE_ATTRIBUTE = 5
NODE_CONFIGURATION = 10
ATTRIBUTE_TENSOR = 5
ATTRIBUTE_GRAPH = 6
TENSOR_TYPE = 2
TENSOR_FLOATS = 4
TENSOR_INTEGERS = 5
TENSOR_NAME = 8
TENSOR_RAW = 9
TENSOR_DOUBLES = 10
FLOATING = frozenset({1, 10, 11, 16})
"""TensorProto's numbers for float32, float16, float64 and bfloat16."""
HALVES = frozenset({10, 16})
"""TensorProto's numbers for float16 and bfloat16. A file may store elements of these types as
varints.
"""
BYTES = frozenset({2, 3, *range(17, 27)})
"""TensorProto's numbers for types of at most 8 bits, which occur in weights but do not determine
shapes.
"""
CONTROL_OPERATORS = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Operators with graphs (bodies) in their attributes."""
DEEPEST_BODY = 16
"""Maximum depth of graphs in attributes of nodes."""
Piece = bytes | memoryview
"""A part of a serialized message."""


def body_tensor_key(number: int, name: str) -> str:
    """Return the key of the locations of tensor `name` in body number `number`. The bodies of
    control-flow nodes are numbered in the order in which they begin in the file.
    """
    return f"{number}\0{name}"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a protobuf message: its number and wire type, and the offsets in the file where
    its payload begins and ends.
    """

    number: int
    wire: int
    start: int
    """Offset in the file where the field begins, including its tag."""
    payload: int
    end: int


def strip_weights(data: memoryview) -> tuple[bytes, dict[str, FileSlice | VarintSlice]]:
    """Return (stripped, locations) for the bytes `data` of an ONNX file.

    - stripped: a serialized ModelProto. It lacks the data of large tensors, and the data of tensors
      that are only present for the PyTorch module's `state_dict`.
    - locations: the locations in the file of these data and of the data of small floating-point
      tensors, by the name of the value. The key of a tensor in a body of control flow is
      `body_tensor_key(number, name)`.

    Raises ModelError if the framing is malformed or if graphs are nested too deeply.
    """
    slices: dict[str, FileSlice | VarintSlice] = {}
    numbers = itertools.count()

    def in_model(field: Field) -> bytes | None:
        """Return the graph without data of large tensors if the field of the model is the graph;
        None for other fields.
        """
        return in_graph(field, str, 0) if field.number == MODEL_GRAPH else None

    def in_graph(graph: Field, key: Callable[[str], str], depth: int) -> bytes:
        """Return the message of a graph without data of large tensors. `key` maps the name of a
        tensor to its key in the locations.
        """
        if depth > DEEPEST_BODY:
            raise ModelError(
                f"graphs are nested more than {DEEPEST_BODY} deep, which is not supported"
            )

        def part(field: Field) -> bytes | None:
            """Return a field of the graph without data of large tensors; None if it is
            unchanged.
            """
            if field.number == GRAPH_INITIALIZER:
                return _strip_tensor(data, field, "", slices, key)
            return (
                in_node(field, key, depth)
                if field.number == GRAPH_NODE and _may_hold_data(data, field)
                else None
            )

        return _rewrite_message(data, graph.payload, graph.end, part)

    def in_node(node: Field, key: Callable[[str], str], depth: int) -> bytes | None:
        """Return the message of a Constant or control-flow node without data of large tensors; None
        for other nodes.
        """
        fields = list(fields_of(data, node.payload, node.end))
        operators = [
            bytes(data[each.payload : each.end]) for each in fields if each.number == NODE_OPERATOR
        ]
        results = [
            bytes(data[each.payload : each.end]) for each in fields if each.number == NODE_OUTPUT
        ]
        holds_bodies = (
            len(operators) == 1 and operators[0].decode(errors="replace") in CONTROL_OPERATORS
        )
        if not holds_bodies and (operators != [b"Constant"] or len(results) != 1):
            return None
        name = "" if holds_bodies else results[0].decode(errors="replace")

        def in_attribute(field: Field) -> bytes | None:
            """Return a field of an attribute without data of large tensors; None if it is
            unchanged.
            """
            if holds_bodies:
                inner = (
                    partial(body_tensor_key, next(numbers))
                    if field.number == ATTRIBUTE_GRAPH
                    else None
                )
                return in_graph(field, inner, depth + 1) if inner else None
            return (
                _strip_tensor(data, field, name, slices, key)
                if field.number == ATTRIBUTE_TENSOR
                else None
            )

        def attribute(field: Field) -> bytes | None:
            """Return an attribute of the node without data of large tensors; None for other
            fields.
            """
            is_attribute = field.number == NODE_ATTRIBUTE
            return (
                _rewrite_message(data, field.payload, field.end, in_attribute)
                if is_attribute
                else None
            )

        return _rewrite_message(data, node.payload, node.end, attribute)

    return _rewrite_message(data, 0, len(data), in_model), slices


def _rewrite_message(
    data: memoryview, start: int, end: int, change: Callable[[Field], bytes | None]
) -> bytes:
    """Return the message from offset `start` to `end` with some payloads replaced. `change` returns
    the new payload of a field, or None if the field is unchanged.
    """
    pieces: list[Piece] = []
    for field in fields_of(data, start, end):
        payload = change(field) if field.wire == LENGTH else None
        pieces.append(
            data[field.start : field.end]
            if payload is None
            else frame_payload(field.number, payload)
        )
    return b"".join(pieces)


def _may_hold_data(data: memoryview, node: Field) -> bool:
    """True if a node may contain data of a tensor or a body, so that its fields must be examined.
    Most nodes are ruled out by this cheap test.
    """
    size = node.end - node.payload
    if size >= LARGE_FLOATS:
        return True
    content = bytes(data[node.payload : node.end])
    return b"Constant" in content or b"body" in content or b"_branch" in content


def _strip_tensor(
    data: memoryview,
    tensor: Field,
    name: str,
    slices: dict[str, FileSlice | VarintSlice],
    key: Callable[[str], str],
) -> bytes:
    """Return the message of a tensor, without its data if they are large. Adds the location of the
    data to `slices`. `name` is the name of the value if the tensor belongs to a Constant node,
    otherwise "".
    """
    fields = list(fields_of(data, tensor.payload, tensor.end))
    kind = 0
    for field in fields:
        if field.number == TENSOR_TYPE and field.wire == VARINT:
            kind, _ = read_varint(data, field.payload, field.end)
        elif field.number == TENSOR_NAME and not name:
            name = bytes(data[field.payload : field.end]).decode(errors="replace")
    holding = {TENSOR_RAW, TENSOR_FLOATS, TENSOR_DOUBLES} | (
        {TENSOR_INTEGERS} if kind in HALVES else set()
    )
    numbers = [
        field
        for field in fields
        if field.wire == LENGTH and field.number in holding and field.end > field.payload
    ]
    size = sum(field.end - field.payload for field in numbers)
    whole = (
        bytes(data[tensor.payload : tensor.end]) if size < LARGE_TABLE or len(numbers) != 1 else b""
    )
    is_read_by_none = is_for_state_only(name)
    least = (
        0 if kind in FLOATING or is_read_by_none else LARGE_FLOATS if kind in BYTES else LARGE_TABLE
    )
    if len(numbers) != 1 or not name or size < least:
        return whole
    found = numbers[0]
    is_listed = found.number == TENSOR_INTEGERS
    slices[key(name)] = (
        VarintSlice(found.payload, size) if is_listed else FileSlice("", found.payload, size)
    )
    if size < LARGE_FLOATS and not is_read_by_none:
        return whole
    return bytes(data[tensor.payload : found.start]) + bytes(data[found.end : tensor.end])


def fields_of(data: memoryview, position: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message from offset `position` to `end`. Raises ModelError if the
    framing is malformed.
    """
    while position < end:
        start = position
        tag, position = read_varint(data, position, end)
        number = tag >> 3
        wire = tag & 7
        payload = position
        if wire == VARINT:
            _, position = read_varint(data, position, end)
        elif wire == LENGTH:
            length, payload = read_varint(data, position, end)
            position = payload + length
        elif wire in (FIXED64, FIXED32):
            position += 8 if wire == FIXED64 else 4
        else:
            raise ModelError(
                f"the file is not an ONNX model: byte {start} starts a field of the unknown wire "
                f"type {wire}"
            )
        if position > end or number == 0:
            raise ModelError(
                f"the file is not an ONNX model or is truncated: the field at byte {start} is "
                "invalid"
            )
        yield Field(number, wire, start, payload, position)


def read_varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """Return (number, offset after it) for the varint at offset `position`. Raises ModelError if it
    is malformed.
    """
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ModelError(
        f"the file is not an ONNX model or is truncated: the number at byte {position} is invalid"
    )


def frame_payload(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field with this field number and payload."""
    return field_header(number, len(payload)) + payload


def field_header(number: int, length: int) -> bytes:
    """Return the tag and length that precede the payload of a length-delimited field."""
    return encode_varint(number << 3 | LENGTH) + encode_varint(length)


def encode_varint(value: int) -> bytes:
    """Return a non-negative integer encoded as varint."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def strip_annotations(data: memoryview) -> Iterator[Piece]:
    """Yield the bytes of a serialized model without its device annotations and its format version.
    The version is omitted because adding annotations may raise it.
    """
    fields = list(fields_of(data, 0, len(data)))
    annotated = any(field.number == MODEL_CONFIGURATION for field in fields)
    for field in fields:
        if annotated and field.number == MODEL_GRAPH and field.wire == LENGTH:
            pieces = list(_strip_graph_annotations(data, field))
            yield field_header(MODEL_GRAPH, sum(map(len, pieces)))
            yield from pieces
        elif field.number not in (MODEL_IR_VERSION, MODEL_CONFIGURATION):
            yield data[field.start : field.end]


def _strip_graph_annotations(data: memoryview, graph: Field) -> Iterator[Piece]:
    """Yield the bytes of a serialized graph without the device annotations of its nodes."""
    for part in fields_of(data, graph.payload, graph.end):
        if part.number != GRAPH_NODE or part.wire != LENGTH:
            yield data[part.start : part.end]
            continue
        kept = [
            field
            for field in fields_of(data, part.payload, part.end)
            if field.number != NODE_CONFIGURATION
        ]
        yield field_header(GRAPH_NODE, sum(field.end - field.start for field in kept))
        yield from (data[field.start : field.end] for field in kept)
