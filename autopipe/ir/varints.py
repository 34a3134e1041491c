"""Decoding of packed integers in the variable-length format of protobuf (varints)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_CONTINUATION_BIT = 0x80
"""Bit of a byte that is set if further bytes of the integer follow."""


def low_bits_of_varints(payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return the low 16 bits of each integer in the bytes `payload` of a packed protobuf field.

    For float16 and bfloat16 values in `TensorProto.int32_data`, these are all bits
    (https://onnx.ai/onnx/api/classes.html).
    """
    if not payload.size:
        return np.empty(0, np.uint16)
    ends = np.flatnonzero(payload < _CONTINUATION_BIT)
    starts = np.concatenate(([0], ends[:-1] + 1))
    places = np.arange(int(ends[-1]) + 1) - np.repeat(starts, ends - starts + 1)
    # Each byte contains seven bits of the integer, the lowest first, so the low 16 bits are in the
    # first three bytes.
    parts = (payload[: places.size] & 0x7F).astype(np.uint32) << np.minimum(7 * places, 31).astype(
        np.uint32
    )
    parts[places > 2] = 0
    return np.asarray(np.add.reduceat(parts, starts) & 0xFFFF, dtype=np.uint16)
