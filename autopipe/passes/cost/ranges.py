"""Sums over all ranges of blocks of a line at once, as matrices indexed by (first block, block after the last)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def range_sums(blocks: NDArray[np.float64]) -> Matrix:
    """`[i, j]` = the sum of blocks i to j - 1."""
    prefix = np.concatenate(([0.0], np.cumsum(blocks)))
    return prefix[None, :] - prefix[:, None]


def range_maxima(blocks: NDArray[np.float64]) -> Matrix:
    """`[i, j]` = the largest of blocks i to j - 1; 0 for empty ranges."""
    count = len(blocks)
    found = np.zeros((count + 1, count + 1))
    for first in range(count):
        found[first, first + 1 :] = np.maximum.accumulate(blocks[first:])
    return found


def distinct_sums(count: int, items: Iterable[tuple[list[int], float]]) -> Matrix:
    """`[i, j]` = the sum over items of their weight, once, where any of an item's blocks is in i to j - 1.

    An item is (its blocks ascending, weight). Each block counts where no earlier one of the item is in the range.
    """
    weights = np.zeros((count + 1, count))
    for blocks, weight in items:
        before = -1
        for block in blocks:
            if block != before:
                weights[before + 1, block] += weight
                before = block
    return _first_hits(weights, count)


def incoming_sums(count: int, values: Iterable[tuple[int, list[int], float]]) -> Matrix:
    """`[i, j]` = the sum of the values that blocks before i produce and blocks i to j - 1 read, once each.

    A value is (producing block, reading blocks ascending, weight).
    """
    weights = np.zeros((count + 1, count))
    for producer, readers, weight in values:
        before = producer
        for block in readers:
            if block != before:
                weights[before + 1, block] += weight
                before = block
    return _first_hits(weights, count)


def outgoing_sums(count: int, values: Iterable[tuple[int, list[int], float]]) -> Matrix:
    """`[i, j]` = the sum of the values that blocks i to j - 1 produce and block j or a later one reads, once each."""
    weights = np.zeros((count, count + 1))
    for producer, readers, weight in values:
        if readers and readers[-1] > producer:
            weights[producer, readers[-1]] += weight
    later = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    prefix = np.concatenate((np.zeros((1, count + 1)), np.cumsum(later, axis=0)))
    return np.maximum(np.diagonal(prefix)[None, :] - prefix, 0.0)


def _first_hits(weights: Matrix, count: int) -> Matrix:
    """From weights by (block after the one before, block): those with the block in range and the one before not."""
    reachable = np.cumsum(weights, axis=0)
    prefix = np.concatenate((np.zeros((count + 1, 1)), np.cumsum(reachable, axis=1)), axis=1)
    return np.maximum(prefix - np.diagonal(prefix)[:, None], 0.0)
