"""Element types of tensors, named as ONNX names them in lower case."""

from __future__ import annotations

import enum


class DType(enum.Enum):
    """The type of a tensor's elements; the value is the name used in files and messages."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """True if gradients can flow through values of this type."""
        return self in _FLOATING

    @property
    def is_integer(self) -> bool:
        """True if values are whole numbers (bool is not counted)."""
        return self.value.startswith(("int", "uint"))


_ITEMSIZE = {
    DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT64: 8,
    DType.INT8: 1, DType.INT16: 2, DType.INT32: 4, DType.INT64: 8,
    DType.UINT8: 1, DType.UINT16: 2, DType.UINT32: 4, DType.UINT64: 8,
    DType.BOOL: 1, DType.COMPLEX64: 8, DType.COMPLEX128: 16,
}  # fmt: skip
_FLOATING = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64})
