"""The header of a safetensors file (https://huggingface.co/docs/safetensors): its length in eight bytes, then as JSON
the type, the shape and the place of each tensor. The tensors follow, row by row and little-endian."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from autopipe.ir.graph import DType

TAGS: Final = {
    DType.FLOAT64: "F64", DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16",
    DType.INT64: "I64", DType.INT32: "I32", DType.INT16: "I16", DType.INT8: "I8",
    DType.UINT64: "U64", DType.UINT32: "U32", DType.UINT16: "U16", DType.UINT8: "U8", DType.BOOL: "BOOL",
    DType.FLOAT8E4M3FN: "F8_E4M3", DType.FLOAT8E5M2: "F8_E5M2", DType.FLOAT8E8M0: "F8_E8M0",
}  # fmt: skip
"""The format's names of element types."""
_PAIRS = {DType.COMPLEX64: "F32", DType.COMPLEX128: "F64"}
_ALIGNMENT = 8


def safetensors_header(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The header of tensors by name, type and shape, each behind the one before; the byte of the file where each
    begins; and the file's size. A complex number is written as two real ones."""
    form: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = dict[str, int](), 0
    for name, dtype, shape in tensors:
        pair = _PAIRS.get(dtype)
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        stored = (*shape, 2) if pair else shape
        form[name] = {"dtype": pair or TAGS[dtype], "shape": stored, "data_offsets": [starts[name], end]}
    text = json.dumps(form).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end
