"""Gradients of parameters that the same ranks add up travel together, in buckets, and so do shares of their update.

A bucket that is shared out (ZeRO-1) is one row of elements: its parameters' blocks one behind the other, each at a
multiple of 16 bytes, filled up so that all ranks have equal shares. Where a share begins and ends has nothing to do
with where parameters do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from autopipe.ir.layout import Box

BUCKET_BYTES = 25 * 2**20
"""A bucket takes no further block once it has as many; 25 MiB is what torch's DistributedDataParallel found good."""
_ALIGNMENT = 16
"""Bytes at whose multiples blocks and shares begin, as vector loads of a GPU want them."""


@dataclass(frozen=True, slots=True)
class Block:
    """A trained block of a parameter that several ranks hold.

    `home` is the stage whose last backward completes its gradient on all of them, None where there is none.
    """

    parameter: int
    elements: int
    dtype: str
    itemsize: int
    ranks: tuple[int, ...]
    home: int | None


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Neighbouring elements, row by row, of a parameter's block: from `start` up to `stop`, at `at` of the share."""

    parameter: int
    start: int
    stop: int
    at: int

    def boxes(self, shape: tuple[int, ...]) -> Iterator[Box]:
        """The same as boxes of a block of `shape`, in order: two for each dimension at most."""
        return _boxes(shape, self.start, self.stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    row, last = start // inner, (stop - 1) // inner
    if row == last or start % inner:
        end = min(inner, stop - row * inner)
        for box in _boxes(shape[1:], start % inner, end):
            yield Box((row, *box.starts), (row + 1, *box.stops))
        start = row * inner + end
    if start < stop:
        rows = start // inner, stop // inner
        if rows[0] < rows[1]:
            yield Box((rows[0], *(0 for _ in shape[1:])), (rows[1], *shape[1:]))
        if rows[1] * inner < stop:
            yield from _boxes(shape, rows[1] * inner, stop)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Blocks of one element type whose gradients the same ranks add up in one exchange."""

    blocks: tuple[Block, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return self.blocks[0].ranks

    @property
    def home(self) -> int | None:
        """The stage whose last backward completes all of its gradients."""
        return self.blocks[0].home

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each block begins in the row, in elements."""
        step = self._step
        ends = accumulate(-(-block.elements // step) * step for block in self.blocks)
        return (0, *ends)[: len(self.blocks)]

    @property
    def share(self) -> int:
        """Elements of each rank's share."""
        used = self.starts[-1] + self.blocks[-1].elements
        return -(-used // (len(self.ranks) * self._step)) * self._step

    @property
    def elements(self) -> int:
        """Elements of the row, what it is filled up with included."""
        return self.share * len(self.ranks)

    @property
    def bytes(self) -> int:
        """Bytes of the row."""
        return self.elements * self.blocks[0].itemsize

    @property
    def _step(self) -> int:
        return max(1, _ALIGNMENT // self.blocks[0].itemsize)

    def runs(self, rank: int) -> Iterator[ElementRange]:
        """Ranges of a rank's shard in each block, in order."""
        first = self.ranks.index(rank) * self.share
        last = first + self.share
        for block, begin in zip(self.blocks, self.starts, strict=True):
            start, stop = max(first, begin), min(last, begin + block.elements)
            if start < stop:
                yield ElementRange(block.parameter, start - begin, stop - begin, start - first)


def buckets_of(blocks: Iterable[Block]) -> tuple[Bucket, ...]:
    """The buckets of a rank's blocks, in the order in which all of their ranks exchange them.

    Those without a home come first, and parameters are taken last first, since backward finishes with the first.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[Block]] = {}
    for block in sorted(blocks, key=lambda block: block.parameter, reverse=True):
        groups.setdefault((-1 if block.home is None else block.home, block.ranks), []).append(block)
    return tuple(bucket for key in sorted(groups) for bucket in _packed(groups[key]))


def _packed(blocks: Iterable[Block]) -> Iterator[Bucket]:
    packed: list[Block] = []
    size = 0
    for block in blocks:
        if packed and (packed[-1].dtype != block.dtype or size >= BUCKET_BYTES):
            yield Bucket(tuple(packed))
            packed, size = [], 0
        packed.append(block)
        size += block.elements * block.itemsize
    if packed:
        yield Bucket(tuple(packed))
