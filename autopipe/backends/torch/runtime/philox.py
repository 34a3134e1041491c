"""Random numbers that any rank can draw from any place of a stream, so that shards equal the whole: element i is made
from the i-th 64-bit word of Philox (Salmon et al., SC 2011) under the stream's key.

Box and Muller (1958) need a logarithm and a cosine, of which libraries differ in the last bit. Here both are
polynomials, made of the operations that IEEE 754 rounds in one way only (sum, product, quotient, root), so that ranks
of different machines hold the same parameters.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_MANTISSA: Final = 52  # Bits of a double below its exponent.
_ROOT_OF_HALF: Final = np.float64(math.sqrt(0.5)).view(np.int64)
_LN_2: Final = math.log(2.0)
_AREA: Final = tuple(1.0 / n for n in range(15, 0, -2))
"""artanh(s) = s · Σ s^2k / (2k + 1), from the last term on; for |s| < 0.172 the next one is below 4e-14."""
_SINE: Final = tuple((-1.0) ** (n // 2) / math.factorial(n) for n in range(17, 0, -2))
"""sin(t) = t · Σ ± t^2k / (2k + 1)!, from the last term on; for |t| ≤ π/2 the next one is below 5e-14."""


def box_muller_normal(words: npt.NDArray[np.uint64]) -> Doubles:
    """Standard normal numbers, one a word: its high half is the radius, its low half the angle. Shape as `words`."""
    halves = words.astype("<u8", copy=False).view("<u4").reshape(*words.shape, 2)
    radius = halves[..., 1].astype(np.float64)
    radius += 1.0
    radius *= 2.0**-32
    _log(radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle = halves[..., 0].astype(np.float64)
    angle *= 2.0**-32
    _cos(angle)
    radius *= angle
    return radius


def _log(values: Doubles) -> None:
    """Replace positive numbers by their natural logarithms."""
    bits = values.view(np.int64)
    exponents = (bits - _ROOT_OF_HALF) >> _MANTISSA
    bits -= exponents << _MANTISSA  # Now in [√½, √2).
    below = values + 1.0
    values -= 1.0
    values /= below
    _odd_polynomial(values, _AREA)
    values *= 2.0
    values += np.multiply(exponents, _LN_2, out=below)


def _cos(turns: Doubles) -> None:
    """Replace numbers of turns in [0, 1) by their cosines: cos(2πv) = sin(2π(|v - ½| - ¼))."""
    turns -= 0.5
    np.abs(turns, out=turns)
    turns -= 0.25
    turns *= 2.0 * math.pi
    _odd_polynomial(turns, _SINE)


def _odd_polynomial(values: Doubles, coefficients: tuple[float, ...]) -> None:
    """Replace x by x · Σ c_k · x^2k; coefficients from the last one on (Horner)."""
    square = values * values
    total = square * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total += coefficient
        total *= square
    total += coefficients[-1]
    values *= total


Words = npt.NDArray[np.uint64]

_WORDS_PER_BLOCK = 4


def key_of(seed: int, stream: tuple[int, ...]) -> Words:
    """The key of a stream; whole numbers from 0, of any size, name it."""
    return np.random.SeedSequence([seed, *stream]).generate_state(2, np.uint64).astype(np.uint64, copy=False)


class WordReader:
    """Reads a stream's words at ascending places; skipping costs nothing, but a call some two microseconds."""

    def __init__(self, key: Words) -> None:
        self._philox = np.random.Philox(key=key)
        self._block = 0

    def read(self, start: int, count: int) -> Words:
        """Words [start, start + count), none of which may lie in or before a block that was read."""
        block, within = divmod(start, _WORDS_PER_BLOCK)
        self._philox.advance(block - self._block)  # Also forgets what is left of the last block.
        self._block = block + -(-(within + count) // _WORDS_PER_BLOCK)
        return self._philox.random_raw(within + count)[within:]


def words(seed: int, stream: tuple[int, ...], start: int, count: int) -> Words:
    """Words [start, start + count) of a stream, uint64."""
    return WordReader(key_of(seed, stream)).read(start, count)


def integers(drawn: Words, below: int) -> npt.NDArray[np.int64]:
    """A whole number in [0, below) for each word."""
    return (drawn % np.uint64(below)).astype(np.int64)


def as_uniform(drawn: Words) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each word."""
    numbers = (drawn >> np.uint64(11)).astype(np.float64)
    numbers *= 2.0**-53
    return numbers
