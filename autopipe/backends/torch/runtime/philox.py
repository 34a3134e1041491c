"""Random numbers that any rank can draw from any place of a stream: counter-based, so shards equal the whole.

Element i of a stream is made from the i-th 64-bit word of Philox (Salmon et al., SC 2011) under the stream's key.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopipe.backends.torch.runtime import box_muller

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


def uniform(seed: int, stream: tuple[int, ...], start: int, count: int) -> np.ndarray:
    """Numbers in [0, 1), float64."""
    return as_uniform(words(seed, stream, start, count))


def normal(seed: int, stream: tuple[int, ...], start: int, count: int) -> np.ndarray:
    """Standard normal numbers, float64."""
    return box_muller.normal(words(seed, stream, start, count))


def integers(seed: int, stream: tuple[int, ...], start: int, count: int, below: int) -> np.ndarray:
    """Whole numbers in [0, below), int64."""
    return (words(seed, stream, start, count) % np.uint64(below)).astype(np.int64)


def as_uniform(drawn: Words) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each word."""
    numbers = (drawn >> np.uint64(11)).astype(np.float64)
    numbers *= 2.0**-53
    return numbers
