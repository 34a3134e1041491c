"""Random numbers that any rank can draw from any place of a stream: counter-based, so shards equal the whole.

Element i of a stream is made from the i-th 64-bit word of Philox (Salmon et al., SC 2011) under the stream's key.
"""

from __future__ import annotations

import numpy as np

_WORDS_PER_BLOCK = 4


def words(seed: int, stream: tuple[int, ...], start: int, count: int) -> np.ndarray:
    """Words [start, start + count) of a stream, uint64."""
    key = np.random.SeedSequence([seed, *stream]).generate_state(2, np.uint64)
    skipped, within = divmod(start, _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=key).advance(skipped)
    return generator.random_raw(within + count)[within:]


def uniform(seed: int, stream: tuple[int, ...], start: int, count: int) -> np.ndarray:
    """Numbers in [0, 1), float64."""
    return (words(seed, stream, start, count) >> np.uint64(11)) * 2.0**-53


def normal(seed: int, stream: tuple[int, ...], start: int, count: int) -> np.ndarray:
    """Standard normal numbers, float64: Box and Muller's transform of the two halves of each word."""
    drawn = words(seed, stream, start, count)
    radius = ((drawn >> np.uint64(32)) + np.uint64(1)).astype(np.float64) * 2.0**-32
    angle = (drawn & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0 * np.pi * 2.0**-32)
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(angle)


def integers(seed: int, stream: tuple[int, ...], start: int, count: int, below: int) -> np.ndarray:
    """Whole numbers in [0, below), int64."""
    return (words(seed, stream, start, count) % np.uint64(below)).astype(np.int64)
