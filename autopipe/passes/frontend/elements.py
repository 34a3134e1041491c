"""ONNX's element types, tensors and attributes as ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, DType, Value

if TYPE_CHECKING:
    import onnx

DTYPES: dict[int, DType] = {
    1: DType.FLOAT32, 2: DType.UINT8, 3: DType.INT8, 4: DType.UINT16, 5: DType.INT16, 6: DType.INT32, 7: DType.INT64,
    9: DType.BOOL, 10: DType.FLOAT16, 11: DType.FLOAT64, 12: DType.UINT32, 13: DType.UINT64, 14: DType.COMPLEX64,
    15: DType.COMPLEX128, 16: DType.BFLOAT16,
}  # fmt: skip
"""By the number that TensorProto.DataType gives them."""
NUMBERS: dict[DType, int] = {dtype: number for number, dtype in DTYPES.items()}


MOST_DIMENSIONS = 64
"""Dimensions that a tensor may have: as many as numpy's and torch's have at most."""
MOST_ELEMENTS = 1 << 60
"""Elements that a tensor may have: their bytes are counted in 64 bits."""


def shape_of(extents: Sequence[int], where: str) -> tuple[int, ...]:
    """A tensor's shape; raises ModelError where it has too many dimensions or elements."""
    if len(extents) > MOST_DIMENSIONS:
        raise ModelError(
            f"a tensor of {len(extents)} dimensions is not supported: at most {MOST_DIMENSIONS} are", where=where
        )
    shape = tuple(extents)
    if math.prod(shape) > MOST_ELEMENTS:
        raise ModelError(f"the shape {shape} has more than {MOST_ELEMENTS} elements", where=where)
    return shape


def dtype_of(number: int, where: str) -> DType:
    """Our element type for ONNX's number; raises ModelError for strings, float8, 4-bit types and unknown numbers."""
    if number not in DTYPES:
        import onnx

        known = onnx.TensorProto.DataType.DESCRIPTOR.values_by_number.get(number)
        raise ModelError(f"element type {known.name if known else number} is not supported", where=where)
    return DTYPES[number]


def array_of(tensor: onnx.TensorProto, where: str) -> np.ndarray:
    """The numbers of a tensor held in the file; raises ModelError where they do not fill its shape."""
    import onnx.numpy_helper

    dtype_of(tensor.data_type, where)
    if tensor.data_location == tensor.EXTERNAL:
        raise ModelError("a constant that tells shapes lies in another file", where=where)
    try:
        return np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).reshape(tuple(tensor.dims))
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(f"broken tensor: {error}", where=where) from error


def tensor_of(array: np.ndarray, dtype: DType) -> onnx.TensorProto:
    """The tensor that holds `array`, whose elements are of type `dtype`."""
    import onnx

    return onnx.TensorProto(
        data_type=NUMBERS[dtype], dims=list(array.shape), raw_data=np.ascontiguousarray(array).tobytes()
    )


def type_proto(value: Value) -> onnx.TypeProto:
    """ONNX's spelling of a value's type."""
    import onnx.helper

    return onnx.helper.make_tensor_type_proto(NUMBERS[value.dtype], value.shape)


def attributes_of(node: onnx.NodeProto) -> tuple[tuple[str, Attribute], ...]:
    """The attributes that a node states, sorted by name.

    A tensor of one element (ConstantOfShape's `value`) becomes a number. Raises ModelError for graphs (control flow),
    types and larger tensors.
    """
    found: dict[str, Attribute] = {}
    for attribute in node.attribute:
        found[attribute.name] = _attribute(attribute, f"{node.op_type} {node.name!r}")
    return tuple(sorted(found.items()))


def _attribute(attribute: onnx.AttributeProto, where: str) -> Attribute:
    kinds = type(attribute)
    match attribute.type:
        case kinds.INT:
            return int(attribute.i)
        case kinds.FLOAT:
            return float(attribute.f)
        case kinds.STRING:
            return attribute.s.decode(errors="replace")
        case kinds.INTS:
            return tuple(attribute.ints)
        case kinds.FLOATS:
            return tuple(attribute.floats)
        case kinds.STRINGS:
            return tuple(text.decode(errors="replace") for text in attribute.strings)
        case kinds.TENSOR:
            array = array_of(attribute.t, where)
            if array.size == 1:
                item = array.reshape(()).item()
                return item if isinstance(item, int | float) else float(item)
    raise ModelError(f"attribute {attribute.name!r} is of a kind that is not supported", where=where)
