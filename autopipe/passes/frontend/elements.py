"""Conversion of ONNX element types, tensors and attributes to those of the graph, and access to the
data of a file's tensors.

External data files are checked, but they are read only if code needs the data.
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
"""Element type by its number in ONNX's enumeration TensorProto.DataType."""
NUMBERS: dict[DType, int] = {dtype: number for number, dtype in DTYPES.items()}
"""Number of each element type in TensorProto.DataType."""
MOST_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in NumPy and PyTorch."""
MOST_ELEMENTS = 1 << 60
"""Maximum number of elements of a tensor, so that its number of bytes fits into 64 bits."""


def checked_shape(extents: Sequence[int], where: str) -> tuple[int, ...]:
    """Return the sizes `extents` as a tuple. Raises ModelError for more than `MOST_DIMENSIONS`
    dimensions or more than `MOST_ELEMENTS` elements. `where` names the tensor in the error.
    """
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
    """Return the element type with this number in ONNX's TensorProto.DataType. Raises ModelError
    for strings and unknown numbers.
    """
    if number not in DTYPES:
        import onnx

        known = onnx.TensorProto.DataType.DESCRIPTOR.values_by_number.get(number)
        raise ModelError(
            f"element type {known.name if known else number} is not supported", where=where
        )
    return DTYPES[number]


def value_of(tensor: onnx.TensorProto, name: str, where: str) -> Value:
    """Return the type and shape of `tensor` as a value called `name`. Raises ModelError for an
    element type that is not supported.
    """
    return Value(name, dtype_of(tensor.data_type, where), tuple(tensor.dims))


def array_of(tensor: onnx.TensorProto, where: str) -> np.ndarray:
    """Return the data of a tensor that is stored in the model file. Raises ModelError if the data
    do not fill the tensor's shape, or if they are in an external file.
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


def tensor_proto(array: np.ndarray, dtype: DType) -> onnx.TensorProto:
    """Return the ONNX message of a tensor with the data `array`, as elements of type `dtype`."""
    import onnx

    if dtype.packed_bits:
        import onnx.numpy_helper

        return onnx.numpy_helper.from_array(array)
    return onnx.TensorProto(
        data_type=NUMBERS[dtype],
        dims=list(array.shape),
        raw_data=np.ascontiguousarray(array).tobytes(),
    )


def scalar_array(value: float, dtype: DType) -> np.ndarray:
    """Return a scalar array of the floating-point type `dtype` (bfloat16 as uint16 bits).

    A value outside of the type's range becomes its largest or smallest finite number. For types
    other than float16 and float64, the range of float32 is used.
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
    """Return the number of bytes that a tensor occupies in a file. Elements of less than 8 bits are
    packed.
    """
    elements = math.prod(shape)
    return -(-elements * dtype.packed_bits // 8) if dtype.packed_bits else elements * dtype.itemsize


def packed_value(value: Value) -> Value:
    """Return the uint8 type of the stored bytes of a tensor whose elements have less than 8 bits.
    The bytes keep the tensor's dimensions if each row fills whole bytes; otherwise they are one
    vector.
    """
    size = stored_bytes(value.dtype, value.shape)
    last = value.shape[-1:]
    per = 8 // value.dtype.packed_bits
    shape = (*value.shape[:-1], last[0] // per) if last and last[0] % per == 0 else (size,)
    return Value(value.name, DType.UINT8, shape)


def type_proto(value: Value) -> onnx.TypeProto:
    """Return the element type and shape of `value` as an ONNX message."""
    import onnx.helper

    return onnx.helper.make_tensor_type_proto(NUMBERS[value.dtype], value.shape)


def replacement_node(
    origin: onnx.NodeProto,
    op: str,
    operands: Sequence[str],
    results: Sequence[str],
    **attributes: Any,
) -> onnx.NodeProto:
    """Return a new node for the replacement of the node `origin`. It has the name of `origin`,
    which error messages show.
    """
    import onnx.helper

    return onnx.helper.make_node(op, operands, results, name=origin.name, **attributes)


def copy_with_names(
    node: onnx.NodeProto, operands: Sequence[str], results: Sequence[str]
) -> onnx.NodeProto:
    """Return a copy of the node that reads `operands` and writes `results`."""
    copy = type(node)()
    copy.CopyFrom(node)
    copy.input[:] = operands
    copy.output[:] = results
    return copy


def attributes_of(node: onnx.NodeProto) -> tuple[tuple[str, Attribute], ...]:
    """Return (name, value) of each attribute of a node, sorted by name.

    A tensor attribute of one element, for example `value` of ConstantOfShape, becomes a number.
    Raises ModelError for larger tensors, for graphs (bodies of control flow) and for types.
    """
    where = f"{node.op_type} {node.name!r}"
    return tuple(
        sorted({each.name: _attribute_value(each, where) for each in node.attribute}.items())
    )


def _attribute_value(attribute: onnx.AttributeProto, where: str) -> Attribute:
    """Return the value of an attribute as a Python object. Raises ModelError for a kind of
    attribute that is not supported.
    """
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


def external_data_path(location: str, model: Path, where: str) -> Path:
    """Return the path of an external data file. `location` is relative to the folder of the ONNX
    file `model`; `where` names the tensor in errors. The returned file may be missing.

    Raises ModelError for an absolute path, a path with `..`, and a name that the file system
    rejects. Also raises ModelError for a link to a file outside of two folders: the folder of
    `model`, and the folder of the file that `model` links to (as in the cache of huggingface_hub).
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
        pass  # The caller reports a missing file or initialises the tensor.
    except OSError as error:
        # Access can fail although the file is not missing, for example if its name is longer than
        # the file system permits.
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


def locate_external_data(tensor: onnx.TensorProto, model: Path) -> FileSlice | None:
    """Return the location of the data of an external tensor of the file `model`; None if the data
    file is missing.

    Raises ModelError if the path is not allowed (see `external_data_path`), if the data file is a
    Git LFS pointer, or if it is too short for the tensor.
    """
    where = f"tensor {tensor.name!r}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    file = external_data_path(location, model, where)
    size = stored_bytes(dtype_of(tensor.data_type, where), tensor.dims)
    offset = _declared_bytes(entries, "offset", 0, where)
    length = _declared_bytes(entries, "length", size, where)
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


def _declared_bytes(entries: dict[str, str], key: str, default: int, where: str) -> int:
    """Return the number of bytes that an external tensor declares under `key`; `default` if the key
    is missing. Raises ModelError if the text is not a number.
    """
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
"""NumPy type with which floating-point data are read from a file. A bfloat16 is read as uint16, the
upper half of a float32.
"""


def read_stored_data(
    name: str, tensor: onnx.TensorProto, slices: Mapping[str, FileSlice | VarintSlice], model: Path
) -> np.ndarray | None:
    """Return the data of a floating-point tensor of the file `model`, memory-mapped if possible.
    `slices` contains the locations of data that the tensor message does not contain.

    Returns None if the file has no data, the data are malformed, or the element type cannot be
    read.
    """
    dtype = dtype_of(tensor.data_type, repr(name))
    place: FileSlice | VarintSlice | None
    try:
        if tensor.data_location == tensor.EXTERNAL:
            place = locate_external_data(tensor, model)
        else:
            place = slices.get(name)
            if place is None:
                return array_of(tensor, repr(name)) if has_data(tensor) else None
    except ModelError:
        # The data may not be needed, so this function returns None. Code that requires the data
        # reports the error.
        return None
    return None if place is None else read_slice(place, dtype, tuple(tensor.dims), model)


def has_data(tensor: onnx.TensorProto) -> bool:
    """True if a tensor message contains data in any of its data fields."""
    listed = (
        tensor.float_data
        or tensor.double_data
        or tensor.int32_data
        or tensor.int64_data
        or tensor.uint64_data
    )
    return bool(tensor.raw_data or listed)


def read_varints(place: VarintSlice, model: Path) -> np.ndarray:
    """Return the lower 16 bits of each integer that the file `model` stores as a varint at
    `place`.
    """
    return low_bits_of_varints(
        np.memmap(model, np.uint8, mode="r", offset=place.offset, shape=(place.length,))
    )


def read_slice(
    place: FileSlice | VarintSlice, dtype: DType, shape: tuple[int, ...], model: Path
) -> np.ndarray | None:
    """Return the floating-point data at the location `place` in the files of `model`; bfloat16 as
    float32. Returns None if the data do not fill `shape` or if the element type is not supported.
    """
    if isinstance(place, VarintSlice):
        bits = read_varints(place, model)
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
