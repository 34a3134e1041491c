"""The numbers of a file's tensors, looked at where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, FileSlice
from autopipe.passes.frontend.elements import array_of, dtype_of
from autopipe.passes.frontend.external import external_slice

if TYPE_CHECKING:
    import onnx

HELD: dict[DType, str] = {DType.FLOAT32: "<f4", DType.FLOAT64: "<f8", DType.FLOAT16: "<f2"}


def stored_numbers(
    name: str, tensor: onnx.TensorProto, slices: Mapping[str, FileSlice], model: Path
) -> np.ndarray | None:
    """The floating-point numbers of a tensor of the file `model`, not copied; None where none are stored."""
    dtype = dtype_of(tensor.data_type, repr(name))
    try:
        if tensor.data_location == tensor.EXTERNAL:
            place = external_slice(tensor, model.parent)
        else:
            place = slices.get(name)
            if place is None:
                return array_of(tensor, repr(name)) if tensor.raw_data or tensor.float_data else None
    except ModelError:
        return None  # Whoever needs the numbers says what is wrong with them.
    return None if place is None else sliced_numbers(place, dtype, tuple(tensor.dims), model)


def sliced_numbers(place: FileSlice, dtype: DType, shape: tuple[int, ...], model: Path) -> np.ndarray | None:
    """The numbers at a place of the model's files; None where they do not fill `shape` or are of no such type."""
    path = model.parent / place.file if place.file else model
    if dtype is not DType.BFLOAT16 and dtype not in HELD:
        return None
    if math.prod(shape) * dtype.itemsize != place.length or not place.length:
        return None
    if dtype is DType.BFLOAT16:
        bits = np.memmap(path, "<u2", mode="r", offset=place.offset, shape=shape or (1,))
        return (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.memmap(path, HELD[dtype], mode="r", offset=place.offset, shape=shape or (1,)).reshape(shape)
