"""Standard normal numbers from random words, by the inverse of the normal distribution function.
The inverse is interpolated linearly from a table.

A 32-bit word w, read as a signed integer, gives u = w + ½. The normal number has the sign of u, and
|u| / 2³², in (0, ½], is the probability that a normal number has this sign and a larger absolute
value. The table is indexed by the sign, the exponent and the first mantissa bits of u as a float32,
so intervals become finer towards the tails. Within an interval the number is linear in u.

The error is below 1e-6. It has two causes: the linear interpolation, with 2⁸ intervals per power of
two, and the rounding to float32. The largest number is 6.34. Numbers near 0 are multiples of about
4e-8, because u has 24 bits.

All results are bitwise equal on every machine. The table is computed by sums, products, quotients
and roots, which IEEE 754 rounds in one way. A slope and u have 24 bits each, so their product is
exact in float64, and a compiler that fuses multiply and add does not change the result.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Doubles = npt.NDArray[np.float64]

_DROPPED_BITS: Final = 15
"""Number of low bits of a float32 that do not index the table. 8 bits of the mantissa remain in the
index.
"""
_INDEX_MASK: Final = (1 << (32 - _DROPPED_BITS)) - 1
_FIRST_POINT: Final = int(np.float32(0.5).view(np.int32)) >> _DROPPED_BITS
"""Table index of the smallest |u|, ½."""
_LAST_POINT: Final = int(np.float32(2.0**31).view(np.int32)) >> _DROPPED_BITS
"""Table index of the largest |u|, 2³¹, whose normal number is 0."""
_NEGATIVE_BIT: Final = 1 << (31 - _DROPPED_BITS)
"""Added to the table index of |u| if u is negative."""


def standard_normal(words: Tensor) -> Tensor:
    """Return a standard normal number, float32, for each random 32-bit word in `words` (int32)."""
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.autopipe.standard_normal(words)
        return found
    return _interpolate(words)


def _interpolate(words: Tensor) -> Tensor:
    """Return a standard normal number, float32, for each random 32-bit word in `words` (int32),
    computed by torch operators.
    """
    intercepts, slopes = _tables_on(words.device)
    shifted = words.to(torch.float32).add_(0.5)
    index = (
        shifted.view(torch.int32)
        .bitwise_right_shift(_DROPPED_BITS)
        .bitwise_and_(_INDEX_MASK)
        .reshape(-1)
    )
    numbers = intercepts.index_select(0, index)
    numbers.addcmul_(slopes.index_select(0, index), shifted.to(torch.float64).reshape(-1))
    return numbers.to(torch.float32).view(words.shape)


@torch.library.custom_op("autopipe::standard_normal", mutates_args=())
def _standard_normal(words: Tensor) -> Tensor:
    """`_interpolate` as a custom operator of torch, so that compiled functions do not contain the
    table.
    """
    return _interpolate(words)


@_standard_normal.register_fake
def _(words: Tensor) -> Tensor:
    """Return the result's type and shape for fake tensors, without values."""
    return torch.empty_like(words, dtype=torch.float32, memory_format=torch.contiguous_format)


_TABLES_BY_DEVICE: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (intercepts, slopes) of the linear interpolation, on a device. They are copied to each
    device once.
    """
    if device in _TABLES_BY_DEVICE:
        return _TABLES_BY_DEVICE[device]
    # The copies to the device are blocking. Otherwise, work on another stream could read the tables
    # before the copies have ended.
    host_intercepts, host_slopes = _interpolation_tables()
    intercepts = torch.from_numpy(host_intercepts).to(device)
    slopes = torch.from_numpy(host_slopes).to(device)
    # Fake tensors have no values. They are not cached, because later calls may need the values of
    # the tables.
    if type(intercepts) is Tensor:
        _TABLES_BY_DEVICE[device] = intercepts, slopes
    return intercepts, slopes


@cache
def _interpolation_tables() -> tuple[Doubles, Doubles]:
    """Return (intercepts, slopes), float64. For u with table index i, the normal number is
    intercepts[i] + slopes[i] · u.
    """
    ends = (
        (np.arange(_FIRST_POINT, _LAST_POINT + 2, dtype=np.int32) << _DROPPED_BITS)
        .view(np.float32)
        .astype(np.float64)
    )
    numbers = -normal_quantiles(np.minimum(ends, 2.0**31) * 2.0**-32)
    slope = (np.diff(numbers) / np.diff(ends)).astype(np.float32).astype(np.float64)
    intercept = numbers[:-1] - slope * ends[:-1]
    intercepts = np.zeros(2 * _NEGATIVE_BIT)
    slopes = np.zeros(2 * _NEGATIVE_BIT)
    intercepts[_FIRST_POINT : _LAST_POINT + 1] = intercept
    slopes[_FIRST_POINT : _LAST_POINT + 1] = slope
    intercepts[_NEGATIVE_BIT + _FIRST_POINT : _NEGATIVE_BIT + _LAST_POINT + 1] = -intercept
    slopes[_NEGATIVE_BIT + _FIRST_POINT : _NEGATIVE_BIT + _LAST_POINT + 1] = slope
    return intercepts, slopes


def normal_quantiles(probabilities: Doubles) -> Doubles:
    """Return the standard normal quantiles of `probabilities` in (0, ½], with a relative error of
    about 1e-15.

    Algorithm: PPND16 of Wichura, "Algorithm AS 241", Applied Statistics 37(3), 1988.
    """
    q = probabilities - 0.5
    central = 0.180625 - q * q
    found = (
        q
        * _polynomial(central, _CENTRAL_COEFFICIENTS[0])
        / _polynomial(central, _CENTRAL_COEFFICIENTS[1])
    )
    distance = np.sqrt(-_portable_log(probabilities))
    for above, coefficients in _TAIL_COEFFICIENTS:
        r = distance - above
        tail = -_polynomial(r, coefficients[0]) / _polynomial(r, coefficients[1])
        applies = (q < -0.425) & (distance > (5.0 if above == 5.0 else 0.0))
        found = np.where(applies, tail, found)
    return found


def _polynomial(x: Doubles, coefficients: tuple[float, ...]) -> Doubles:
    """Return the values of a polynomial at x, by Horner's rule. `coefficients` start with the
    highest power.
    """
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


_MANTISSA: Final = 52
"""Number of mantissa bits of a float64, which are below its exponent."""
_ROOT_OF_HALF: Final = np.float64(math.sqrt(0.5)).view(np.int64)
_LN_2: Final = 0.6931471805599453
_ARTANH_COEFFICIENTS: Final = tuple(1.0 / n for n in range(19, 0, -2))
"""Coefficients 1 / (2k + 1) of the series artanh(s) = s · Σ s²ᵏ / (2k + 1), highest power first.
For |s| below 0.172, the first omitted term is below 3e-17.
"""


def _portable_log(values: Doubles) -> Doubles:
    """Return the natural logarithms of positive numbers, bitwise equal on every machine. The
    logarithms of math libraries differ in the last bit.
    """
    bits = values.view(np.int64)
    exponents = (bits - _ROOT_OF_HALF) >> _MANTISSA
    # The mantissas are in [√½, √2), so that s is near 0 and a short polynomial suffices.
    mantissas = (bits - (exponents << _MANTISSA)).view(np.float64)
    s = (mantissas - 1.0) / (mantissas + 1.0)
    return 2.0 * s * _polynomial(s * s, _ARTANH_COEFFICIENTS) + exponents * _LN_2


_CENTRAL_COEFFICIENTS: Final = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
"""Coefficients of the numerator and the denominator for probabilities within 0.425 of ½."""
_TAIL_COEFFICIENTS: Final = (
    (
        1.6,
        (
            (
                7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
                1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
                4.63033784615654529590e0, 1.42343711074968357734e0,
            ),
            (
                1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
                1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
                2.05319162663775882187e0, 1.0,
            ),
        ),
    ),
    (
        5.0,
        (
            (
                2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
                2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580e0,
                5.46378491116411436990e0, 6.65790464350110377720e0,
            ),
            (
                2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
                7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
                5.99832206555887937690e-1, 1.0,
            ),
        ),
    ),
)  # fmt: skip
"""For smaller probabilities p: the constant that is subtracted from √(-ln p), then the coefficients
of the numerator and the denominator. The second entry is for √(-ln p) above 5.
"""
