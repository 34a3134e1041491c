"""Downsets of a graph of blocks: sets that contain, with each block, all blocks on which it
depends.

The blocks of the first k stages of a pipeline always form a downset. A deep graph without branches
has few downsets, so a search over all of them is exact for any number of stages. With many parallel
branches, their number is exponential.

Sets of blocks are represented as integers whose bit b is set if block b is in the set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAXIMUM_STEPS = 50_000
"""Maximum number of sets of blocks for which `count_downsets` stores a count before it gives up."""
_CELLS = 2**22
"""Maximum number of pairs of downsets (sets that contain, with each block, all blocks that it
depends on) that are compared at once. It bounds the memory of the comparison.
"""


def count_downsets(needs: tuple[int, ...]) -> int | None:
    """Return the number of downsets (sets that contain, with each block, all blocks that it depends
    on) of a graph of blocks, including the empty one. Return None if counting takes too long.

    `needs` has, for each block in topological order, the set of the blocks that it reads from. If
    the blocks consist of independent parts, the result is the product of the counts of the parts.
    Otherwise a block v with the most ancestors and descendants is chosen:

        count(S) = count(S without v and all blocks that v needs)
             + count(S without v and all blocks that need v)

    The first term counts the downsets that contain v, the second term those that do not.
    """
    below = transitive_needs(needs)
    above = [
        sum(1 << other for other, need in enumerate(below) if need >> block & 1)
        for block in range(len(needs))
    ]
    linked = [one | other for one, other in zip(below, above, strict=True)]
    known = {0: 1}

    def count(left: int) -> int:
        """Return the number of downsets of the graph of the blocks in the bit set `left`. Raises
        OverflowError after `_MAXIMUM_STEPS` sets.
        """
        found = known.get(left)
        if found is not None:
            return found
        if len(known) > _MAXIMUM_STEPS:
            raise OverflowError
        part = connected_component(left, linked)
        if part != left:
            found = count(part) * count(left & ~part)
        else:
            block = max(set_bits(left), key=lambda each: ((linked[each] & left).bit_count(), -each))
            itself = 1 << block
            found = count(left & ~(below[block] | itself)) + count(left & ~(above[block] | itself))
        known[left] = found
        return found

    try:
        return count((1 << len(needs)) - 1)
    except (OverflowError, RecursionError):
        return None


def transitive_needs(needs: Sequence[int]) -> list[int]:
    """Return, for each block, the set of all blocks that it depends on, directly or indirectly.
    `needs` contains, for each block in topological order, the set of the blocks that it reads from.
    """
    below: list[int] = []
    for need in needs:
        found = need
        for other in set_bits(need):
            found |= below[other]
        below.append(found)
    return below


def connected_component(left: int, linked: Sequence[int]) -> int:
    """Return the set of the blocks in `left` that are connected with the lowest block of `left`.
    `linked` has, for each block, the set of its neighbours; only neighbours in `left` count.
    """
    found = waiting = left & -left
    while waiting:
        new = 0
        for block in set_bits(waiting):
            new |= linked[block]
        waiting = new & left & ~found
        found |= waiting
    return found


def set_bits(mask: int) -> list[int]:
    """Return the positions of the bits that are set in `mask`, in ascending order."""
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


def downset_levels(needs: Sequence[int], most: float = math.inf) -> list[list[int]] | None:
    """Return all downsets (sets that contain, with each block, all blocks that it depends on),
    grouped by their number of blocks and in ascending order in each group. Return None if there are
    more than `most`.

    `needs` contains, for each block in topological order, the set of the blocks that it reads from.
    The next group is found by extending each downset by each block whose dependencies it contains.
    """
    readers: list[list[int]] = [[] for _ in needs]
    for reader, need in enumerate(needs):
        for block in set_bits(need):
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


def _bit_rows(masks: Sequence[int], blocks: int) -> NDArray[np.uint64]:
    """Return an array with one row per set of blocks in `masks`. A row has the bits of the set in
    words of 64 bits.
    """
    words = max(1, -(-blocks // 64))
    packed = np.frombuffer(
        b"".join(mask.to_bytes(8 * words, "little") for mask in masks), np.dtype("<u8")
    )
    return packed.reshape(len(masks), words)


def membership(masks: Sequence[int], blocks: int) -> NDArray[np.bool_]:
    """Return a boolean array [d, b] that is True if the set `masks[d]` contains block b. `blocks`
    is the number of blocks.
    """
    packed = _bit_rows(masks, blocks).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=blocks, bitorder="little").astype(bool)


Figures = NDArray[np.float64]
"""One number per pair of nested downsets, the outer of which contains the inner one."""


@dataclass(frozen=True, slots=True)
class NestedPairs:
    """Some of the pairs of nested downsets of a `Downsets` object. In a pair, the outer downset
    contains the inner one. `numbers` are the indices of the pairs in the object's list of all
    pairs; `inner` and `outer` are the indices of the inner and outer downset of each pair.
    """

    numbers: NDArray[np.int64]
    inner: NDArray[np.int64]
    outer: NDArray[np.int64]

    def some(self, positions: NDArray[np.int64] | NDArray[np.bool_]) -> NestedPairs:
        """Return the pairs that `positions` selects: indices, or a boolean mask."""
        return NestedPairs(self.numbers[positions], self.inner[positions], self.outer[positions])

    def difference(self, values: NDArray[np.float64]) -> Figures:
        """Return, for each pair, the value of its outer downset minus the value of its inner
        downset. `values` contains one number per downset.
        """
        found: Figures = values.take(self.outer)
        found -= values.take(self.inner)
        return found


class Downsets:
    """All downsets (sets that contain, with each block, all blocks that it depends on) of a graph
    in descending order of size, and all pairs of nested downsets, of which the outer one contains
    the inner one.

    `holds[d, b]` is True if downset d contains block b. Downset 0 contains all blocks, and the last
    downset is empty. Pair p is (`inner[p]`, `outer[p]`), the indices of two different downsets; the
    blocks that are only in the outer downset can form a stage. Pairs are ordered by their inner
    downset.

    All downsets of one size form a level. Level i consists of the downsets `levels[i]` … `levels[i
    + 1] - 1`. The pairs whose inner downset is in level i are the pairs `starts[i]` … `starts[i +
    1] - 1`.
    """

    def __init__(self, needs: tuple[int, ...]) -> None:
        """Enumerate the downsets. `needs` contains, for each block in topological order, the set of
        the blocks that it reads from.
        """
        found = (downset_levels(needs) or [])[::-1]
        masks = [mask for level in found for mask in level]
        packed = _bit_rows(masks, len(needs))
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
    def pairs(self) -> NestedPairs:
        """All pairs of nested downsets, of which the outer one contains the inner one."""
        return NestedPairs(np.arange(len(self.inner)), self.inner, self.outer)
