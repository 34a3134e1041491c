"""Numbers of 8, 4 and 2 bits, with which torch does not compute: to them, from them, and packed in
bytes.

Whole numbers of less than a byte are held in int8 or uint8, float4 (OCP Microscaling Formats 1.0,
section 5.3.3) as its code in uint8.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.quantized import unpacked

_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
"""The bit of a float4's sign."""
_ROUNDED_DOWN = 464.0
"""Largest number that float8_e4m3fn rounds to its own largest."""
_FRACTION = 23
_EXPONENT = 0xFF
"""Bits of a float32's fraction, and its largest exponent, that of infinities."""


def unpack(data: Tensor, bits: int, signed: bool, shape: tuple[int, ...]) -> Tensor:
    """The elements in bytes of a file, low bits first."""
    numbers = unpacked(data, bits)
    if data.dim() == 1:
        numbers = numbers[: math.prod(shape)]
    return wrapped(numbers, bits, signed).reshape(shape)


def wrapped(x: Tensor, bits: int, signed: bool) -> Tensor:
    """Whole numbers modulo 2^bits, fractions cut off."""
    lowest = 1 << bits - 1 if signed else 0
    whole = x.to(torch.int16 if x.dtype in (torch.uint8, torch.int8) else torch.int64)
    return (((whole + lowest) & ((1 << bits) - 1)) - lowest).to(
        torch.int8 if signed else torch.uint8
    )


def to_float4(x: Tensor) -> Tensor:
    """Codes of the nearest numbers, halves to even codes, too large ones to the largest; of NaN,
    which it has none of, that of -0.
    """
    size = x.float().abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower, (small, large) in enumerate(itertools.pairwise(_FLOAT4)):
        middle = (small + large) / 2
        code += (size >= middle) if lower % 2 else (size > middle)
    negative = torch.signbit(x) | torch.isnan(x)
    return code + negative.to(torch.uint8) * _SIGN


def from_float4(code: Tensor) -> Tensor:
    size = torch.zeros_like(code, dtype=torch.float32)
    for place, number in enumerate(_FLOAT4):
        size = torch.where((code & (_SIGN - 1)) == place, number, size)
    return torch.where(code >= _SIGN, -size, size)


def to_float8(x: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """The nearest numbers; too large ones to the largest, or else to infinity or NaN."""
    if saturate:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    elif dtype == torch.float8_e4m3fn:  # Which torch saturates.
        x = torch.where(x.abs() > _ROUNDED_DOWN, float("nan"), x)
    return x.to(dtype)


def to_exponent(x: Tensor, rounding: str = "up", saturate: bool = True) -> Tensor:
    """The powers of two of float8_e8m0fnu, from the bits of single precision."""
    bits = x.float().view(torch.int32)
    exponent = (bits >> _FRACTION) & _EXPONENT
    fraction = bits & ((1 << _FRACTION) - 1)
    half = 1 << _FRACTION - 1
    nearest = (fraction > half) | ((fraction == half) & (exponent > 0))
    up = {"up": fraction > 0, "nearest": nearest, "down": torch.zeros_like(nearest)}[rounding]
    up = up & (exponent < (_EXPONENT - 1 if saturate else _EXPONENT))
    return (exponent + up).to(torch.uint8).view(torch.float8_e8m0fnu)
