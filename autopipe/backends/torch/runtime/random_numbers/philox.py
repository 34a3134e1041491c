"""Philox4x32-10, the counter-based generator of all random numbers of a program.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the
constants are those of the authors' implementation Random123. The generator is a function from a key
of 64 bits and a counter of 128 bits to a block of four 32-bit words. It has no state.

Invariants:

  - A key belongs to a seed and a purpose (`key_of`), a counter to a position in a tensor. So a
    rank can draw any part of a tensor without the rest.
  - The implementations by torch operators, NumPy and Triton give equal words for equal keys and
    counters. So equal positions have equal numbers on every device.

A word is an element of an int32 tensor that holds the bits of an unsigned integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from autopipe.backends.torch.runtime.random_numbers.philox_numpy import draw_words_by_numpy

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[int, int] | tuple[Tensor, Tensor]
"""The two 32-bit halves of a key, integers in [0, 2³²). If they are tensors, they are int64 and
have no dimensions.
"""
CounterBlock = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four int64 tensors of integers in [0, 2³²), whose shapes broadcast together: the four words of a
counter, or of a block of random words.
"""

WORDS_PER_BLOCK: Final = 4
LOW_32_BITS: Final = 0xFFFFFFFF
"""Mask of the low 32 bits."""
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


class Purpose(IntEnum):
    """Purpose of random numbers. Numbers for different purposes have different keys, even if the
    seed is equal.
    """

    PARAMETER = 1
    FORWARD = 2
    SHUFFLE = 3
    BATCH = 4
    TOKEN = 5


def key_of(seed: int, purpose: Purpose, *numbers: int) -> tuple[int, int]:
    """Return the key for a seed and a purpose, derived by NumPy's SeedSequence. `numbers`,
    nonnegative integers of any size, distinguish keys of one seed and purpose.
    """
    state = np.random.SeedSequence([seed, int(purpose), *numbers]).generate_state(2, np.uint64)
    first, second = (int(word) & LOW_32_BITS for word in state)
    return first, second


def philox_4x32(counter: CounterBlock, key: Key) -> CounterBlock:
    """Return the block of random words for each counter, int64 in [0, 2³²).

    Each of ten rounds maps the counter words (c0, c1, c2, c3), with the key words (k0, k1), to

      (hi(M1·c2) ^ c1 ^ k0,  lo(M1·c2),  hi(M0·c0) ^ c3 ^ k1,  lo(M0·c0))

    where hi and lo are the high and low 32 bits of a 64-bit product, and M0, M1 are `_MULTIPLIERS`.
    Between rounds, `_KEY_STEPS` are added to k0 and k1 modulo 2³².
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        # A product of two 32-bit words may overflow int64. Its 64 bits are correct nevertheless,
        # and later operations use only the bits.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        if number:
            k0 = (k0 + _KEY_STEPS[0]) & LOW_32_BITS
            k1 = (k1 + _KEY_STEPS[1]) & LOW_32_BITS
        # c1 and c3 become full 64-bit products, although only their low halves count. The masks in
        # the next round and in the result remove the high halves.
        c0 = ((product1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(LOW_32_BITS)
        c2 = ((product0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(LOW_32_BITS)
        c1 = product1
        c3 = product0
    return c0, c1 & LOW_32_BITS, c2, c3 & LOW_32_BITS


@dataclass(frozen=True, slots=True)
class CounterRows:
    """Counters for rows of blocks of random words.

    Block b of a row has the counter words (low half of n, second, third, fourth) with n = first +
    b. All tensors are int64, of shape [rows, 1], or [1, 1] if equal for all rows.
    """

    first: Tensor
    third: Tensor
    fourth: Tensor
    second: Tensor | None = None
    """The second counter word, in which case n must be below 2³². If it is None, the second counter
    word is the high half of n.
    """

    @staticmethod
    def from_first(first: Tensor) -> CounterRows:
        """Return counters for rows, of which row i has the counters first[i], first[i] + 1, and so
        on. `first` is int64 [rows].
        """
        zero = torch.zeros((1, 1), dtype=torch.int64, device=first.device)
        return CounterRows(first[:, None], zero, zero)

    def slice(self, rows: slice) -> CounterRows:
        """Return the counters of the rows in a slice."""

        def slice_part(tensor: Tensor) -> Tensor:
            return tensor[rows] if len(tensor) > 1 else tensor

        second = None if self.second is None else slice_part(self.second)
        return CounterRows(
            slice_part(self.first), slice_part(self.third), slice_part(self.fourth), second
        )


def draw_words(rows: CounterRows, start: int, stop: int, key: Key) -> Tensor:
    """Return the random words of blocks [start, stop) of each row, int32 [rows, 4 · (stop -
    start)]. A row is a sequence of blocks of four words. Uses the fastest implementation for the
    device.
    """
    kernel = _kernel_for(rows.first)
    if kernel is not None:
        return kernel(rows.first, rows.second, rows.third, rows.fourth, start, stop, key)
    return draw_words_by_operators(rows, start, stop, key)


def draw_words_by_operators(rows: CounterRows, start: int, stop: int, key: Key) -> Tensor:
    """Return the random words of blocks [start, stop) of each row, as `draw_words` does, by torch
    operators. A row is a sequence of blocks of four words. Works on any device.
    """
    position = rows.first + torch.arange(start, stop, device=rows.first.device)
    second = position >> 32 if rows.second is None else rows.second
    block = philox_4x32((position & LOW_32_BITS, second, rows.third, rows.fourth), key)
    height, width = block[0].shape
    words = torch.empty((height, width, WORDS_PER_BLOCK), dtype=torch.int32, device=position.device)
    for index, word in enumerate(block):
        words[:, :, index] = word
    return words.view(height, WORDS_PER_BLOCK * width)


def draw_sequence(key: tuple[int, int], start: int, count: int) -> Tensor:
    """Return words [start, start + count) of a key's sequence, int32 [count] on the CPU. The
    sequence consists of the blocks with the counters 0, 1, 2, and so on.
    """
    first, lead = divmod(start, WORDS_PER_BLOCK)
    blocks = -(-(lead + count) // WORDS_PER_BLOCK)
    words = draw_words(CounterRows.from_first(torch.tensor([first])), 0, blocks, key)
    return words[0, lead : lead + count]


def as_unsigned(words: Tensor) -> Tensor:
    """Return random words (int32, which hold unsigned integers) as integers in [0, 2³²), int64."""
    return words.to(torch.int64).bitwise_and_(LOW_32_BITS)


def integers_below(words: Tensor, below: int) -> Tensor:
    """Return an integer in [0, below) for each random word, int64: word · below / 2³², rounded
    down, with the word as an unsigned integer. If `below` exceeds 2³¹, 2³¹ is used.
    """
    return (as_unsigned(words) * min(below, 1 << 31)).bitwise_right_shift_(32)


def _kernel_for(tensor: Tensor) -> Callable[..., Tensor] | None:
    """Return the fastest function that draws random words on the device of `tensor`; None if
    `draw_words_by_operators` must be used.

    It must be used in a function that torch compiles, because Inductor fuses the operators, and for
    tensor subclasses, for example fake tensors.
    """
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return None
    if tensor.device.type == "cpu":
        return draw_words_by_numpy
    return _triton_kernel() if tensor.device.type == "cuda" else None


@cache
def _triton_kernel() -> Callable[..., Tensor] | None:
    """Return the function that calls the Triton kernel; None if Triton is not installed."""
    try:
        from autopipe.backends.torch.runtime.random_numbers.philox_kernel import (
            draw_words_by_kernel,
        )
    except ImportError:
        return None
    return draw_words_by_kernel
