"""Downsets: sets of blocks that hold, with a block, all that it needs. What runs first is always one of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_STEPS = 50_000
"""Sets of blocks that counting looks at; it is given up after that."""

_CELLS = 2**22
"""Cells of a table made at once."""


def count_downsets(needs: tuple[int, ...]) -> int | None:
    """The number of downsets, the empty one among them; None where counting takes too long.

    `needs` are what each block reads from, as bits, in topological order. Blocks that have nothing to do with each
    other multiply; otherwise the downsets with a block, all that it needs set aside, and those without it, all that
    needs it set aside, add up.
    """
    below = _closed(needs)
    above = [sum(1 << other for other, need in enumerate(below) if need >> block & 1) for block in range(len(needs))]
    linked = [one | other for one, other in zip(below, above, strict=True)]
    known = {0: 1}

    def count(left: int) -> int:
        found = known.get(left)
        if found is not None:
            return found
        if len(known) > _MOST_STEPS:
            raise OverflowError
        part = _component(left, linked)
        if part != left:
            found = count(part) * count(left & ~part)
        else:
            block = max(_bits(left), key=lambda each: ((linked[each] & left).bit_count(), -each))
            itself = 1 << block
            found = count(left & ~(below[block] | itself)) + count(left & ~(above[block] | itself))
        known[left] = found
        return found

    try:
        return count((1 << len(needs)) - 1)
    except (OverflowError, RecursionError):
        return None


def _closed(needs: tuple[int, ...]) -> list[int]:
    """For each block everything it needs, directly or not."""
    below: list[int] = []
    for need in needs:
        found = need
        for other in _bits(need):
            found |= below[other]
        below.append(found)
    return below


def _component(left: int, linked: list[int]) -> int:
    """The blocks of `left` that have to do with its first one, through others of it too."""
    found = waiting = left & -left
    while waiting:
        new = 0
        for block in _bits(waiting):
            new |= linked[block]
        waiting = new & left & ~found
        found |= waiting
    return found


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


Figures = NDArray[np.float64]
"""A figure for each pair."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some of the pairs: their numbers, and the downsets of each."""

    numbers: NDArray[np.int64]
    inner: NDArray[np.int64]
    outer: NDArray[np.int64]

    def some(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> Pairs:
        """The pairs at some places among these."""
        return Pairs(self.numbers[places], self.inner[places], self.outer[places])

    def difference(self, figures: NDArray[np.float64]) -> Figures:
        """For each pair how much more a figure of downsets is of the outer one than of the inner one."""
        found: Figures = figures.take(self.outer)
        found -= figures.take(self.inner)
        return found


@dataclass(frozen=True, slots=True)
class Downsets:
    """All downsets, larger ones first, and every pair of which one holds the other.

    `holds[d, b]` says whether downset d holds block b: d = 0 holds all, the last one none. Pair p is (`inner[p]`,
    `outer[p]`), two different downsets: what the outer one has more can be a stage. Pairs go by inner downset. The
    downsets of one number of blocks are `levels[i]` to `levels[i + 1] - 1`; the pairs with such an inner one are
    `starts[i]` to `starts[i + 1] - 1`.
    """

    holds: NDArray[np.bool_]
    inner: NDArray[np.int64]
    outer: NDArray[np.int64]
    levels: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def pairs(self) -> Pairs:
        """All of them."""
        return Pairs(np.arange(len(self.inner)), self.inner, self.outer)


def all_downsets(needs: tuple[int, ...]) -> Downsets:
    """The downsets of blocks that need what `needs` says, as bits, in topological order."""
    found = [[0]]
    while True:
        larger = {
            held | 1 << block
            for held in found[-1]
            for block, need in enumerate(needs)
            if not held >> block & 1 and need & ~held == 0
        }
        if not larger:
            break
        found.append(sorted(larger))
    found.reverse()
    packed = _packed([mask for level in found for mask in level], len(needs))
    levels, starts = [0], [0]
    inner: list[NDArray[np.int64]] = []
    outer: list[NDArray[np.int64]] = []
    for level in found:
        first = levels[-1]
        levels.append(first + len(level))
        for begin, end in _chunks(first, levels[-1], first):
            missing = packed[begin:end, None] & ~packed[None, :first]
            inside, outside = np.nonzero(~missing.any(axis=2))
            inner.append(inside + begin)
            outer.append(outside)
        starts.append(sum(map(len, inner)))
    shifts = np.arange(len(needs))
    holds = (packed[:, shifts // 64] >> (shifts % 64).astype(np.uint64) & np.uint64(1)).astype(bool)
    return Downsets(holds, np.concatenate(inner), np.concatenate(outer), tuple(levels), tuple(starts))


def _packed(masks: list[int], blocks: int) -> NDArray[np.uint64]:
    """Bits of masks in words of 64."""
    words = range(max(1, -(-blocks // 64)))
    return np.array([[mask >> 64 * word & (1 << 64) - 1 for word in words] for mask in masks], np.uint64)


def _chunks(begin: int, end: int, width: int) -> list[tuple[int, int]]:
    """Rows of a table so wide, in parts of no more than `_CELLS`."""
    rows = max(1, _CELLS // max(1, width))
    return [(first, min(first + rows, end)) for first in range(begin, end, rows)]
