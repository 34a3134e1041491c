"""Tensors of a file that were not trained, and whose numbers do not stand in its small part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from autopipe.ir.graph import DType, FileSlice, Value
from autopipe.ir.layout import Box
from autopipe.passes.export.numbers import Numbers
from autopipe.passes.frontend.elements import dtype_of, external_slice

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source


def kept_tensors(
    graph: onnx.GraphProto, source: Source, trained: Collection[str]
) -> tuple[list[Numbers], list[Numbers]]:
    """Initializers and constants of `graph` without numbers there, but for those that are `trained`.

    First those whose numbers lie in the file itself, then those in files beside it.

    `graph` is that of the file of `source` without the numbers of its large tensors.
    """
    inside: list[Numbers] = []
    beside: list[Numbers] = []
    for name, tensor in _tensors(graph):
        if name in trained or tensor.raw_data or tensor.float_data or tensor.double_data:
            continue
        if tensor.data_location == tensor.EXTERNAL:
            place = external_slice(tensor, source.path.parent)
        else:
            place = source.slices.get(name)
        if place is not None:
            value = Value(name, dtype_of(tensor.data_type, name), tuple(tensor.dims))
            (beside if place.file else inside).append(_stored(value, place, source.path))
    return inside, beside


def _tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], attribute.t


def _stored(value: Value, place: FileSlice, model: Path) -> Numbers:
    path = model.parent / place.file if place.file else model
    dtype = np.dtype("<u2" if value.dtype is DType.BFLOAT16 else value.dtype.value).newbyteorder("<")

    def read(box: Box) -> npt.NDArray[np.generic]:
        stored = np.memmap(path, dtype, mode="r", offset=place.offset, shape=value.shape or (1,))
        return stored[tuple(map(slice, box.starts, box.stops))].reshape(box.shape)

    return Numbers(value, read)
