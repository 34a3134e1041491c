"""Conversion to and from types of 8, 4 and 2 bits with which torch cannot compute, and unpacking of
such types from bytes.

Integers of fewer than 8 bits are stored in int8 or uint8, one per element. A float4 (OCP
Microscaling Formats 1.0, section 5.3.3) is stored as its code, the 4 bits of the number, in uint8.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.quantized import unpack_bits

_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4_SIGN_BIT = 8
"""Value of the sign bit in the code of a float4."""
_MAX_ROUNDED_TO_FINITE = 464.0
"""Largest absolute value that is rounded to a finite float8_e4m3fn, and not to NaN."""
_FLOAT32_FRACTION_BITS = 23
_FLOAT32_MAX_EXPONENT = 0xFF
"""`_FLOAT32_FRACTION_BITS` is the number of bits of a float32's fraction. `_FLOAT32_MAX_EXPONENT`
is the exponent field of infinities and NaN.
"""


def unpack(data: Tensor, bits: int, signed: bool, shape: tuple[int, ...]) -> Tensor:
    """Return the integers of `bits` bits that are packed in the bytes of `data`, as a tensor of
    shape `shape` and type int8 or uint8. The lowest bits of a byte come first.
    """
    numbers = unpack_bits(data, bits)
    if data.dim() == 1:
        numbers = numbers[: math.prod(shape)]
    return wrapped(numbers, bits, signed).reshape(shape)


def wrapped(x: Tensor, bits: int, signed: bool) -> Tensor:
    """Return x as integers of `bits` bits, in int8 or uint8. Fractions are cut off; numbers out of
    range wrap around modulo 2^bits.
    """
    lowest = 1 << bits - 1 if signed else 0
    whole = x.to(torch.int16 if x.dtype in (torch.uint8, torch.int8) else torch.int64)
    return (((whole + lowest) & ((1 << bits) - 1)) - lowest).to(
        torch.int8 if signed else torch.uint8
    )


def to_float4(x: Tensor) -> Tensor:
    """Return the code of the float4 that is nearest to each number, uint8. Ties go to even codes.
    Numbers that are too large become the largest float4. NaN becomes -0, because float4 has no NaN.
    """
    size = x.float().abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower, (small, large) in enumerate(itertools.pairwise(_FLOAT4_VALUES)):
        middle = (small + large) / 2
        code += (size >= middle) if lower % 2 else (size > middle)
    negative = torch.signbit(x) | torch.isnan(x)
    return code + negative.to(torch.uint8) * _FLOAT4_SIGN_BIT


def from_float4(code: Tensor) -> Tensor:
    """Return the numbers with these float4 codes, float32."""
    size = torch.zeros_like(code, dtype=torch.float32)
    for place, number in enumerate(_FLOAT4_VALUES):
        size = torch.where((code & (_FLOAT4_SIGN_BIT - 1)) == place, number, size)
    return torch.where(code >= _FLOAT4_SIGN_BIT, -size, size)


def to_float8(x: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """Return x rounded to the nearest numbers of `dtype`, a float8 type. Numbers that are too large
    become the largest number with `saturate`, otherwise infinity, or NaN if the type has no
    infinity.
    """
    if saturate:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    # torch saturates when it converts to float8_e4m3fn, so numbers that are too large are replaced
    # by NaN before the conversion.
    elif dtype == torch.float8_e4m3fn:
        x = torch.where(x.abs() > _MAX_ROUNDED_TO_FINITE, float("nan"), x)
    return x.to(dtype)


def to_exponent(x: Tensor, rounding: str = "up", saturate: bool = True) -> Tensor:
    """Return x rounded to powers of two, as float8_e8m0fnu. `rounding` is `up`, `down` or
    `nearest`. The exponent is taken from the bits of float32; the sign is ignored. With `saturate`,
    rounding up does not exceed the largest power of two.
    """
    bits = x.float().view(torch.int32)
    exponent = (bits >> _FLOAT32_FRACTION_BITS) & _FLOAT32_MAX_EXPONENT
    fraction = bits & ((1 << _FLOAT32_FRACTION_BITS) - 1)
    half = 1 << _FLOAT32_FRACTION_BITS - 1
    nearest = (fraction > half) | ((fraction == half) & (exponent > 0))
    up = {"up": fraction > 0, "nearest": nearest, "down": torch.zeros_like(nearest)}[rounding]
    up = up & (exponent < (_FLOAT32_MAX_EXPONENT - 1 if saturate else _FLOAT32_MAX_EXPONENT))
    return (exponent + up).to(torch.uint8).view(torch.float8_e8m0fnu)
