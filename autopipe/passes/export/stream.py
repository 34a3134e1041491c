"""A model and its tensors as bytes, one piece after the other.

A message's fields may stand in any order (https://protobuf.dev/programming-guides/encoding): a tensor's numbers come
last in it, the tensors last in the graph, and the graph last in the model, so that all lengths are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Final

from autopipe.ir.graph import Value
from autopipe.passes.export.numbers import Numbers
from autopipe.passes.frontend.elements import NUMBERS
from autopipe.passes.frontend.protobuf_scan import (
    ATTRIBUTE_TENSOR,
    GRAPH_INITIALIZER,
    GRAPH_NODE,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    TENSOR_RAW,
    framed,
    header,
)

if TYPE_CHECKING:
    import onnx

Progress = Callable[[int], None]

ALIGNMENT: Final = 4096
"""Offset of each tensor in a data file, so that it can be mapped into memory."""


def write_beside(file: IO[bytes], tensors: Sequence[Numbers], progress: Progress) -> dict[str, int]:
    """Write the numbers of tensors into a data file; their offsets in it, by name."""
    places: dict[str, int] = {}
    for each in tensors:
        file.write(bytes(-file.tell() % ALIGNMENT))
        places[each.value.name] = file.tell()
        _write(file, each, progress)
    return places


def write_model(
    file: IO[bytes],
    model: onnx.ModelProto,
    tensors: Sequence[Numbers],
    constants: Mapping[str, onnx.NodeProto],
    data: str,
    places: Mapping[str, int],
    progress: Progress,
) -> None:
    """Write the model with these tensors besides its own; those that have `places` lie there in the file `data`.

    A tensor is the value of the node that `constants` has for it, else an initializer. `model` loses its graph.
    """
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    nodes = [(_node_head(constants[each.value.name], each), each) for each in tensors if each.value.name in constants]
    initializers = [
        (_initializer_head(each, data, places.get(each.value.name)), each)
        for each in tensors
        if each.value.name not in constants
    ]
    streamed = sum(each.value.bytes for each in tensors if each.value.name not in places)
    size = len(graph) + sum(len(head) for head, _ in (*nodes, *initializers)) + streamed
    file.write(model.SerializeToString() + header(MODEL_GRAPH, size))
    for head, each in nodes:  # Before all others: these read nothing.
        file.write(head)
        _write(file, each, progress)
    file.write(graph)
    for head, each in initializers:
        file.write(head)
        if each.value.name not in places:
            _write(file, each, progress)


def _initializer_head(numbers: Numbers, data: str, place: int | None) -> bytes:
    """An initializer up to its numbers, or all of it where they lie in the file `data`."""
    import onnx

    value = numbers.value
    if place is None:
        head = _tensor_head(value)
        return header(GRAPH_INITIALIZER, len(head) + value.bytes) + head
    tensor = onnx.TensorProto(name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, entry in (("location", data), ("offset", place), ("length", value.bytes)):
        tensor.external_data.add(key=key, value=str(entry))
    return framed(GRAPH_INITIALIZER, tensor.SerializeToString())


def _node_head(node: onnx.NodeProto, numbers: Numbers) -> bytes:
    """A Constant node up to its numbers."""
    import onnx

    size = numbers.value.bytes
    tensor = _tensor_head(numbers.value)
    attribute = onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR).SerializeToString()
    attribute += header(ATTRIBUTE_TENSOR, len(tensor) + size) + tensor
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.attribute[:]
    head: bytes = bare.SerializeToString()
    head += header(NODE_ATTRIBUTE, len(attribute) + size) + attribute
    return header(GRAPH_NODE, len(head) + size) + head


def _tensor_head(value: Value) -> bytes:
    import onnx

    head: bytes = onnx.TensorProto(
        name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape
    ).SerializeToString()
    return head + header(TENSOR_RAW, value.bytes)


def _write(file: IO[bytes], numbers: Numbers, progress: Progress) -> None:
    for piece in numbers.pieces():
        file.write(piece)
        progress(len(piece))
