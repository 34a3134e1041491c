"""Philox4x32-10 in NumPy, computed in place on unsigned integers. On a CPU it takes half of the
time of torch operators.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Key = tuple[int, int] | tuple[Tensor, Tensor]
Words = npt.NDArray[np.uint64]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_HALF_WORD_BITS = np.uint64(32)
_LOW_32_BITS = np.uint64(0xFFFFFFFF)


def draw_words_by_numpy(
    first: Tensor,
    second: Tensor | None,
    third: Tensor,
    fourth: Tensor,
    start: int,
    stop: int,
    key: Key,
) -> Tensor:
    """Return the random words of blocks [start, stop) of each row, as `philox.draw_words` does. A
    row is a sequence of blocks of four words. The tensors are those of `philox.CounterRows`.
    """
    blocks: Words = np.arange(start, stop).astype(np.uint64)
    position = _as_unsigned_array(first) + blocks
    high = position >> _HALF_WORD_BITS if second is None else _as_unsigned_array(second)
    counter = np.broadcast_arrays(
        position & _LOW_32_BITS, high, _as_unsigned_array(third), _as_unsigned_array(fourth)
    )
    c0, c1, c2, c3 = (np.array(each, order="C") for each in counter)
    product0 = np.empty_like(c0)
    product1 = np.empty_like(c0)
    key0 = int(key[0])
    key1 = int(key[1])
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        _mix_words(product1, c1, key0, c0)
        _mix_words(product0, c3, key1, c2)
        # The full 64-bit products become the next c1 and c3, although only their low halves count.
        # The mask in the next round or the cast at the end removes the high halves.
        c1, product1 = product1, c1
        c3, product0 = product0, c3
        key0 = (key0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        key1 = (key1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    height, width = c0.shape
    words = np.empty((height, width, 4), np.uint32)
    for index, word in enumerate((c0, c1, c2, c3)):
        np.copyto(words[:, :, index], word, casting="unsafe")
    return torch.from_numpy(words.view(np.int32).reshape(height, 4 * width))


def _mix_words(product: Words, other: Words, key: int, out: Words) -> None:
    """Write the low 32 bits of (product >> 32) ^ other ^ key to `out`."""
    np.right_shift(product, _HALF_WORD_BITS, out=out)
    np.bitwise_xor(out, other, out=out)
    np.bitwise_xor(out, np.uint64(key), out=out)
    np.bitwise_and(out, _LOW_32_BITS, out=out)


def _as_unsigned_array(tensor: Tensor) -> Words:
    """Return a view of an int64 tensor as a uint64 array."""
    return tensor.numpy().view(np.uint64)
