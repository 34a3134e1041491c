"""Conversion of ONNX element types, tensors and attributes, and access to the stored data of a
file's tensors.

External data files are checked, but they are not read unless the values are needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError, quote
from autopipe.ir.files import lfs_error
from autopipe.ir.graph import Attribute, DType, FileSlice, Value, VarintSlice
from autopipe.ir.varints import low_bits_of_varints
from autopipe.ir.words import plural

if TYPE_CHECKING:
    import onnx

DTYPES: dict[int, DType] = {
    1: DType.FLOAT32,
    2: DType.UINT8,
    3: DType.INT8,
    4: DType.UINT16,
    5: DType.INT16,
    6: DType.INT32,
    7: DType.INT64,
    9: DType.BOOL,
    10: DType.FLOAT16,
    11: DType.FLOAT64,
    12: DType.UINT32,
    13: DType.UINT64,
    14: DType.COMPLEX64,
    15: DType.COMPLEX128,
    16: DType.BFLOAT16,
    17: DType.FLOAT8E4M3FN,
    18: DType.FLOAT8E4M3FNUZ,
    19: DType.FLOAT8E5M2,
    20: DType.FLOAT8E5M2FNUZ,
    21: DType.UINT4,
    22: DType.INT4,
    23: DType.FLOAT4E2M1,
    24: DType.FLOAT8E8M0,
    25: DType.UINT2,
    26: DType.INT2,
}
"""Element type by its number in TensorProto.DataType."""
NUMBERS: dict[DType, int] = {dtype: number for number, dtype in DTYPES.items()}
MOST_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in NumPy and PyTorch."""
MOST_ELEMENTS = 1 << 60
"""Maximum number of elements of a tensor, so that its bytes can be counted in 64 bits."""


def shape_of(extents: Sequence[int], where: str) -> tuple[int, ...]:
    """Return the shape as a tuple. Raise ModelError if it has too many dimensions or elements."""
    if len(extents) > MOST_DIMENSIONS:
        raise ModelError(
            f"the tensor has {len(extents)} {plural(len(extents), 'dimension')}, expected at "
            f"most {MOST_DIMENSIONS}",
            where=where,
        )
    shape = tuple(extents)
    if math.prod(shape) > MOST_ELEMENTS:
        raise ModelError(
            f"the tensor has the shape {shape}, expected at most {MOST_ELEMENTS} elements",
            where=where,
        )
    return shape


def dtype_of(number: int, where: str) -> DType:
    """Return the element type for ONNX's type number. Raise ModelError for strings and unknown
    numbers.
    """
    if number not in DTYPES:
        import onnx

        known = onnx.TensorProto.DataType.DESCRIPTOR.values_by_number.get(number)
        raise ModelError(
            f"element type {known.name if known else number} is not supported", where=where
        )
    return DTYPES[number]


def value_of(tensor: onnx.TensorProto, name: str, where: str) -> Value:
    """Return the type and shape of a tensor of a file as a value with the name `name`. Raise
    ModelError as `dtype_of`.
    """
    return Value(name, dtype_of(tensor.data_type, where), tuple(tensor.dims))


def array_of(tensor: onnx.TensorProto, where: str) -> np.ndarray:
    """Return the data of a tensor stored in the model file. Raise ModelError if the data does not
    fill its shape, or if it is in an external file.
    """
    import onnx.numpy_helper

    dtype_of(tensor.data_type, where)
    if tensor.data_location == tensor.EXTERNAL:
        raise ModelError(
            "a constant that determines shapes is stored in an external data file, which is not "
            "supported",
            where=where,
        )
    try:
        return np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).reshape(tuple(tensor.dims))
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(f"the tensor cannot be read: {error}", where=where) from error


def tensor_of(array: np.ndarray, dtype: DType) -> onnx.TensorProto:
    import onnx

    if dtype.packed_bits:
        import onnx.numpy_helper

        return onnx.numpy_helper.from_array(array)
    return onnx.TensorProto(
        data_type=NUMBERS[dtype],
        dims=list(array.shape),
        raw_data=np.ascontiguousarray(array).tobytes(),
    )


def number_array(value: float, dtype: DType) -> np.ndarray:
    """Return a scalar array of a floating-point type. A value outside of the type's range is
    replaced by the largest or smallest finite value of float16, float32 or float64; bfloat16 uses
    the range of float32.
    """
    most = float(
        np.finfo(dtype.value if dtype in (DType.FLOAT16, DType.FLOAT64) else np.float32).max
    )
    value = max(-most, min(most, value))
    if dtype is DType.BFLOAT16:
        bits = np.asarray(value, np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16)
    return np.asarray(value, dtype.value)


def stored_bytes(dtype: DType, shape: Sequence[int]) -> int:
    """Return the number of bytes of a tensor in a file."""
    elements = math.prod(shape)
    return -(-elements * dtype.packed_bits // 8) if dtype.packed_bits else elements * dtype.itemsize


def packed_value(value: Value) -> Value:
    """Return the type of the bytes of a tensor with sub-byte elements: the same rows if they fill
    bytes, otherwise a vector of bytes.
    """
    size = stored_bytes(value.dtype, value.shape)
    last = value.shape[-1:]
    per = 8 // value.dtype.packed_bits
    shape = (*value.shape[:-1], last[0] // per) if last and last[0] % per == 0 else (size,)
    return Value(value.name, DType.UINT8, shape)


def type_proto(value: Value) -> onnx.TypeProto:
    import onnx.helper

    return onnx.helper.make_tensor_type_proto(NUMBERS[value.dtype], value.shape)


def made_node(
    origin: onnx.NodeProto,
    op: str,
    operands: Sequence[str],
    results: Sequence[str],
    **attributes: Any,
) -> onnx.NodeProto:
    """Return a node that replaces a part of the node `origin`, with the same name."""
    import onnx.helper

    return onnx.helper.make_node(op, operands, results, name=origin.name, **attributes)


def renamed(
    node: onnx.NodeProto, operands: Sequence[str], results: Sequence[str]
) -> onnx.NodeProto:
    """Return a copy of the node with other operands and results."""
    copy = type(node)()
    copy.CopyFrom(node)
    copy.input[:] = operands
    copy.output[:] = results
    return copy


def attributes_of(node: onnx.NodeProto) -> tuple[tuple[str, Attribute], ...]:
    """Return the attributes of a node, sorted by name.

    A tensor of one element (`value` of ConstantOfShape) becomes a number. Raise ModelError for
    graphs (control flow), types and larger tensors.
    """
    where = f"{node.op_type} {node.name!r}"
    return tuple(sorted({each.name: _attribute(each, where) for each in node.attribute}.items()))


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
    raise ModelError(f"attribute {attribute.name!r} has a type that is not supported", where=where)


def external_file(location: str, model: Path, where: str) -> Path:
    """Return the path of the external data file at `location`, which is relative to the folder of
    the ONNX file `model`. `where` is the location in error messages. The file may be missing.

    Raise ModelError for an absolute path, a path with `..`, and a name that the file system
    rejects. Also raise ModelError for a link that leads outside the model's folder and outside the
    folder of the file that `model` links to (as in the cache of huggingface_hub).
    """
    path = PurePosixPath(location)
    if (
        not location
        or "\0" in location
        or "\\" in location
        or path.is_absolute()
        or ".." in path.parts
    ):
        raise ModelError(
            f"the external data file is {location!r}, expected a file inside the model's folder",
            where=where,
        )
    if Path(location).drive:
        raise ModelError(
            f"the external data file {location!r} is on another drive, expected a file inside "
            "the model's folder",
            where=where,
        )
    file = model.parent / location
    try:
        file.lstat()
    except FileNotFoundError:
        pass  # The caller reports missing data or initialises the tensor.
    except OSError as error:
        # For example, the name is longer than the file system allows.
        raise ModelError(
            f"the external data file {quote(location)} cannot be read: {error.strerror}",
            where=where,
        ) from error
    if not any(
        file.resolve().is_relative_to(folder)
        for folder in (model.parent.resolve(), model.resolve().parent)
    ):
        raise ModelError(
            f"the external data file {location!r} is a link to a file outside the model's folder",
            where=where,
        )
    return file


def external_slice(tensor: onnx.TensorProto, model: Path) -> FileSlice | None:
    """Return the location of an external tensor of the file `model`; None if its data file is
    missing.

    Raise ModelError as `external_file`, for a Git LFS pointer, and for a file that is too short for
    the tensor.
    """
    where = f"tensor {tensor.name!r}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    file = external_file(location, model, where)
    size = stored_bytes(dtype_of(tensor.data_type, where), tensor.dims)
    offset = _number(entries, "offset", 0, where)
    length = _number(entries, "length", size, where)
    if length < size:
        raise ModelError(
            f"the tensor has {length} {plural(length, 'byte')} of external data, and its shape "
            f"requires {size}",
            where=where,
        )
    if not file.exists():
        return None
    if not file.is_file():
        raise ModelError(f"the external data file {location!r} is not a regular file", where=where)
    if pointer := lfs_error(file):
        raise ModelError(*pointer, where=where)
    if file.stat().st_size < offset + size:
        raise ModelError(
            f"the external data file {location!r} has {file.stat().st_size} "
            f"{plural(file.stat().st_size, 'byte')}, and the tensor requires {offset + size}",
            where=where,
        )
    return FileSlice(location, offset, size)


def _number(entries: dict[str, str], key: str, default: int, where: str) -> int:
    text = entries.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelError(
            f"the external data has the {key} {text!r}, expected a number of bytes", where=where
        )
    return int(text)


HELD: dict[DType, str] = {
    DType.FLOAT32: "<f4",
    DType.FLOAT64: "<f8",
    DType.FLOAT16: "<f2",
    DType.BFLOAT16: "<u2",
}
"""NumPy type of stored floating-point values. A bfloat16 is the upper half of a float32."""


def stored_numbers(
    name: str, tensor: onnx.TensorProto, slices: Mapping[str, FileSlice | VarintSlice], model: Path
) -> np.ndarray | None:
    """Return the floating-point values of a tensor of the file `model`; None if no valid values are
    stored. Arrays are memory-mapped if the type allows it.
    """
    dtype = dtype_of(tensor.data_type, repr(name))
    place: FileSlice | VarintSlice | None
    try:
        if tensor.data_location == tensor.EXTERNAL:
            place = external_slice(tensor, model)
        else:
            place = slices.get(name)
            if place is None:
                return array_of(tensor, repr(name)) if has_numbers(tensor) else None
    except ModelError:
        return None  # Code that requires the values reports the error.
    return None if place is None else sliced_numbers(place, dtype, tuple(tensor.dims), model)


def has_numbers(tensor: onnx.TensorProto) -> bool:
    """True if a tensor message contains data in any of its fields."""
    listed = (
        tensor.float_data
        or tensor.double_data
        or tensor.int32_data
        or tensor.int64_data
        or tensor.uint64_data
    )
    return bool(tensor.raw_data or listed)


def listed_numbers(place: VarintSlice, model: Path) -> np.ndarray:
    """Return the bits of 16-bit values that the file `model` stores as varints."""
    return low_bits_of_varints(
        np.memmap(model, np.uint8, mode="r", offset=place.offset, shape=(place.length,))
    )


def sliced_numbers(
    place: FileSlice | VarintSlice, dtype: DType, shape: tuple[int, ...], model: Path
) -> np.ndarray | None:
    """Return the values at a location of the model's files. None if they do not fill `shape` or the
    element type is not supported.
    """
    if isinstance(place, VarintSlice):
        bits = listed_numbers(place, model)
        if dtype not in (DType.FLOAT16, DType.BFLOAT16) or bits.size != math.prod(shape):
            return None
        halves = (
            bits.view(np.float16)
            if dtype is DType.FLOAT16
            else (bits.astype(np.uint32) << 16).view(np.float32)
        )
        return halves.reshape(shape)
    if dtype not in HELD or math.prod(shape) * dtype.itemsize != place.length or not place.length:
        return None
    path = model.parent / place.file if place.file else model
    numbers: np.ndarray = np.memmap(
        path, HELD[dtype], mode="r", offset=place.offset, shape=shape or (1,)
    )
    if dtype is DType.BFLOAT16:
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.reshape(shape)
