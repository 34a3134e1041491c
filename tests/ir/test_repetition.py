"""`longest_run` against a search over all runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.repetition import longest_run

ITEMS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=2, max_size=16)
"""(kind, micro-batch) of each item."""


def run_at(items: list[tuple[int, int]], start: int, length: int, distance: int) -> int:
    """Return the number of repetitions from `start` on, each `distance` micro-batches later."""
    count = 1
    while True:
        first = items[start + (count - 1) * length : start + count * length]
        second = items[start + count * length : start + (count + 1) * length]
        if second != [(kind, number + distance) for kind, number in first]:
            return count
        count += 1


@given(ITEMS, st.integers(1, 4))
def test_longest_run_has_the_maximum_number_of_repetitions(
    items: list[tuple[int, int]], length: int
) -> None:
    length = min(length, len(items) // 2)
    kinds, numbers = np.array(items).T
    start, count, distance = longest_run(kinds[length:] == kinds[:-length], numbers, length)
    counts = [
        run_at(items, position, length, each)
        for position in range(len(items) - 2 * length + 1)
        for each in range(1, 6)
    ]
    assert count == (max(counts) if max(counts) > 1 else 0)
    if count:
        assert distance >= 1
        assert run_at(items, start, length, distance) == count
