"""A block of a row-major tensor as runs of neighbouring elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContiguousRanges:
    """Runs of `length` elements each, in the tensor's order; together they are the block, row-major."""

    first: int
    """Place of the block's first element in the tensor."""
    length: int
    counts: tuple[int, ...]
    """Extents of the grid in which the runs lie, outer to inner; () for one run."""
    strides: tuple[int, ...]
    """Elements of the tensor from one run to the next, along each of those dimensions."""
    count: int
    """Number of runs; 0 for an empty block."""

    def places(self, start: int, stop: int) -> Places:
        """Where runs [start, stop) begin in the tensor, int64, ascending."""
        found = np.full(stop - start, self.first, np.int64)
        left = np.arange(start, stop, dtype=np.int64)
        for extent, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            left, index = np.divmod(left, extent)
            found += index * stride
        return found


def contiguous_ranges(shape: tuple[int, ...], starts: tuple[int, ...], stops: tuple[int, ...]) -> ContiguousRanges:
    """The runs of block [starts, stops) of a tensor of `shape`: as long, and as few, as there are."""
    first, length, stride, count = 0, 1, 1, 1
    outer: list[tuple[int, int]] = []
    for extent, start, stop in reversed(list(zip(shape, starts, stops, strict=True))):
        if length == stride:  # All that lies below is in the block.
            length *= stop - start
        else:
            outer.insert(0, (stop - start, stride))
            count *= stop - start
        first += start * stride
        stride *= extent
    counts, strides = tuple(each for each, _ in outer), tuple(each for _, each in outer)
    return ContiguousRanges(first, length, counts, strides, count if length else 0)
