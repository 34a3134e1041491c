"""Element types by the names that numpy and safetensors have for them."""

from __future__ import annotations

import numpy as np

_STORED_AS = {"bfloat16": "uint16"}
"""Types of the same width that numpy reads in place of types it does not know."""
_TAGS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_PAIRS = {"complex64": "F32", "complex128": "F64"}


def numpy_type(dtype: str) -> np.dtype:
    """The type of stored elements: little-endian, and whole numbers of 16 bits for bfloat16."""
    return np.dtype(_STORED_AS.get(dtype, dtype)).newbyteorder("<")


def safetensors_type(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and shape for safetensors, to which a complex number is two real ones."""
    return (_PAIRS[dtype], (*shape, 2)) if dtype in _PAIRS else (_TAGS[dtype], shape)
