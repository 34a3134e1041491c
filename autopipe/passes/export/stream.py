"""A model and its tensors as bytes, one piece after the other.

A message's fields may stand in any order (https://protobuf.dev/programming-guides/encoding): a tensor's numbers come
last in it, the tensors last in the graph, and the graph last in the model, so that all lengths are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Final

from autopipe.passes.export.numbers import Numbers
from autopipe.passes.frontend.elements import NUMBERS
from autopipe.passes.frontend.wire import GRAPH_INITIALIZER, MODEL_GRAPH, TENSOR_RAW, header

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
    data: str,
    places: Mapping[str, int],
    progress: Progress,
) -> None:
    """Write the model with these initializers besides its own; those that have `places` lie there in the file `data`.

    `model` loses its graph.
    """
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    heads = [_head(each, data, places.get(each.value.name)) for each in tensors]
    sizes = [
        len(head) + (0 if each.value.name in places else each.value.bytes)
        for head, each in zip(heads, tensors, strict=True)
    ]
    headers = [header(GRAPH_INITIALIZER, size) for size in sizes]
    file.write(model.SerializeToString())
    file.write(header(MODEL_GRAPH, len(graph) + sum(map(len, headers)) + sum(sizes)))
    file.write(graph)
    for before, head, each in zip(headers, heads, tensors, strict=True):
        file.write(before)
        file.write(head)
        if each.value.name not in places:
            _write(file, each, progress)


def _head(numbers: Numbers, data: str, place: int | None) -> bytes:
    """A tensor's message up to its numbers, or all of it where they lie in the file `data`."""
    import onnx

    value = numbers.value
    tensor = onnx.TensorProto(name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape)
    if place is None:
        head: bytes = tensor.SerializeToString()
        return head + header(TENSOR_RAW, value.bytes)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, entry in (("location", data), ("offset", place), ("length", value.bytes)):
        tensor.external_data.add(key=key, value=str(entry))
    whole: bytes = tensor.SerializeToString()
    return whole


def _write(file: IO[bytes], numbers: Numbers, progress: Progress) -> None:
    for piece in numbers.pieces():
        file.write(piece)
        progress(len(piece))
