"""Detection of the repeated part of a list, such as the tasks of a device or the instructions of a
program.

A part of a list repeats if each item equals the item `length` positions before it, except for its
micro-batch, and all micro-batches increase by one common distance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def longest_run(
    is_equal: NDArray[np.bool_], micro_batches: NDArray[Any], length: int
) -> tuple[int, int, int]:
    """Return (start, count, distance) of the longest series of consecutive repetitions of `length`
    items.

    - start: index of the first item of the series.
    - count: number of repetitions; 0 if nothing repeats. Of several longest series, the first is
      returned.
    - distance: difference between the micro-batches of consecutive repetitions, 1 or more.

    `is_equal[i]` is True if item i + `length` equals item i except for its micro-batch. Time and
    memory are linear in the length of the list.
    """
    distances = np.where(
        is_equal, np.maximum(micro_batches[length:] - micro_batches[:-length], 0), 0
    )
    # If n consecutive items equal the items `length` positions later, with one distance of
    # micro-batches, the sequence of `length` items occurs n // length + 1 times.
    starts = np.concatenate(([0], np.flatnonzero(np.diff(distances)) + 1))
    spans = np.diff(np.concatenate((starts, [len(distances)])))
    counts = np.where((distances[starts] > 0) & (spans >= length), 1 + spans // length, 0)
    found = int(np.argmax(counts))
    return int(starts[found]), int(counts[found]), int(distances[starts[found]])
