"""Downsets: sets of blocks that hold, with a block, all that it needs. What is done after some
stages is always one.

A deep graph without branches has few of them, so that searches over all are exact, whatever the
number of stages; with many parallel branches there are exponentially many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_STEPS = 50_000
"""Sets of blocks that counting looks at; it is given up after that."""
_CELLS = 2**22
"""Cells of a table made at once."""


def count_downsets(needs: tuple[int, ...]) -> int | None:
    """The number of downsets, the empty one among them; None where counting takes too long. `needs`
    are what each block reads from, as bits, in topological order. Blocks that have nothing to do
    with each other multiply; otherwise the downsets with a block, all that it needs set aside, and
    those without it, all that needs it set aside, add up.
    """
    below = closed(needs)
    above = [
        sum(1 << other for other, need in enumerate(below) if need >> block & 1)
        for block in range(len(needs))
    ]
    linked = [one | other for one, other in zip(below, above, strict=True)]
    known = {0: 1}

    def count(left: int) -> int:
        found = known.get(left)
        if found is not None:
            return found
        if len(known) > _MOST_STEPS:
            raise OverflowError
        part = component(left, linked)
        if part != left:
            found = count(part) * count(left & ~part)
        else:
            block = max(bits(left), key=lambda each: ((linked[each] & left).bit_count(), -each))
            itself = 1 << block
            found = count(left & ~(below[block] | itself)) + count(left & ~(above[block] | itself))
        known[left] = found
        return found

    try:
        return count((1 << len(needs)) - 1)
    except (OverflowError, RecursionError):
        return None


def closed(needs: Sequence[int]) -> list[int]:
    """For each block everything it needs, directly or not."""
    below: list[int] = []
    for need in needs:
        found = need
        for other in bits(need):
            found |= below[other]
        below.append(found)
    return below


def component(left: int, linked: Sequence[int]) -> int:
    """The blocks of `left` that are linked with its first one, through others of it too."""
    found = waiting = left & -left
    while waiting:
        new = 0
        for block in bits(waiting):
            new |= linked[block]
        waiting = new & left & ~found
        found |= waiting
    return found


def bits(mask: int) -> list[int]:
    """The places of the ones of a number, ascending."""
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


def downset_levels(needs: Sequence[int], most: float = math.inf) -> list[list[int]] | None:
    """All downsets as bits, ascending, by the number of their blocks; None where they are more than
    `most`. `needs` as `count_downsets` takes them. Each downset of a level goes on with one of the
    blocks that are ready.
    """
    readers: list[list[int]] = [[] for _ in needs]
    for reader, need in enumerate(needs):
        for block in bits(need):
            readers[block].append(reader)
    level = {0: frozenset(block for block, need in enumerate(needs) if not need)}
    found = [[0]]
    total = 1
    for _ in needs:
        larger: dict[int, frozenset[int]] = {}
        for downset, ready in level.items():
            for block in ready:
                if (mask := downset | 1 << block) not in larger:
                    new = [each for each in readers[block] if needs[each] & ~mask == 0]
                    larger[mask] = ready - {block} | frozenset(new)
        found.append(sorted(larger))
        total += len(larger)
        if total > most:
            return None
        level = larger
    return found


def _packed(masks: Sequence[int], blocks: int) -> NDArray[np.uint64]:
    """Bits of masks in words of 64."""
    words = max(1, -(-blocks // 64))
    packed = np.frombuffer(
        b"".join(mask.to_bytes(8 * words, "little") for mask in masks), np.dtype("<u8")
    )
    return packed.reshape(len(masks), words)


def membership(masks: Sequence[int], blocks: int) -> NDArray[np.bool_]:
    """At [d, b] whether downset d holds block b."""
    packed = _packed(masks, blocks).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=blocks, bitorder="little").astype(bool)


Figures = NDArray[np.float64]
"""A figure for each pair."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some of the pairs: their numbers, and the downsets of each."""

    numbers: NDArray[np.int64]
    inner: NDArray[np.int64]
    outer: NDArray[np.int64]

    def some(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> Pairs:
        return Pairs(self.numbers[places], self.inner[places], self.outer[places])

    def difference(self, figures: NDArray[np.float64]) -> Figures:
        """For each pair how much more a figure of downsets is of the outer one than of the inner
        one.
        """
        found: Figures = figures.take(self.outer)
        found -= figures.take(self.inner)
        return found


class Downsets:
    """All downsets, larger ones first, and every pair of which one holds the other. `holds[d, b]`
    says whether downset d holds block b: d = 0 holds all, the last one none. Pair p is (`inner[p]`,
    `outer[p]`), two different downsets: what the outer one has more can be a stage. Pairs go by
    inner downset. The downsets of one number of blocks are `levels[i]` to `levels[i + 1] - 1`; the
    pairs with such an inner one are `starts[i]` to `starts[i + 1] - 1`.
    """

    def __init__(self, needs: tuple[int, ...]) -> None:
        """`needs` are what each block reads from, as bits, in topological order."""
        found = (downset_levels(needs) or [])[::-1]
        masks = [mask for level in found for mask in level]
        packed = _packed(masks, len(needs))
        self.holds = membership(masks, len(needs))
        self.levels = [0]
        self.starts = [0]
        inner: list[NDArray[np.int64]] = []
        outer: list[NDArray[np.int64]] = []
        for level in found:
            first = self.levels[-1]
            self.levels.append(first + len(level))
            rows = max(1, _CELLS // max(1, first))
            for begin in range(first, self.levels[-1], rows):
                end = min(begin + rows, self.levels[-1])
                missing = packed[begin:end, None] & ~packed[None, :first]
                inside, outside = np.nonzero(~missing.any(axis=2))
                inner.append(inside + begin)
                outer.append(outside)
            self.starts.append(sum(map(len, inner)))
        self.inner = np.concatenate(inner)
        self.outer = np.concatenate(outer)

    @property
    def pairs(self) -> Pairs:
        return Pairs(np.arange(len(self.inner)), self.inner, self.outer)
