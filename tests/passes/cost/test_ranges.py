from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.analysis.chain import (
    incoming_sums,
    item_sums,
    outgoing_sums,
    range_maxima,
    range_sums,
)

COUNT = 6
RANGES = [(first, stop) for first in range(COUNT) for stop in range(first + 1, COUNT + 1)]
weights = st.integers(0, 9).map(float)
blocks = st.sets(st.integers(0, COUNT - 1), min_size=1).map(sorted)


@given(st.lists(weights, min_size=COUNT, max_size=COUNT))
def test_sums_and_maxima(figures: list[float]) -> None:
    sums = range_sums(np.array(figures))
    maxima = range_maxima(np.array(figures))
    for first, stop in RANGES:
        assert sums[first, stop] == sum(figures[first:stop])
        assert maxima[first, stop] == max(figures[first:stop])


@given(st.lists(st.tuples(blocks, weights)))
def test_distinct_items_count_once(items: list[tuple[list[int], float]]) -> None:
    found = item_sums(COUNT, items)
    for first, stop in RANGES:
        assert found[first, stop] == sum(
            weight for where, weight in items if any(first <= block < stop for block in where)
        )


@given(st.lists(st.tuples(blocks, weights)))
def test_values_that_come_in_and_go_out(items: list[tuple[list[int], float]]) -> None:
    values = [(where[0], where[1:], weight) for where, weight in items]
    coming = incoming_sums(COUNT, values)
    going = outgoing_sums(COUNT, values)
    for first, stop in RANGES:
        assert coming[first, stop] == sum(
            weight
            for producer, readers, weight in values
            if producer < first and any(first <= reader < stop for reader in readers)
        )
        assert going[first, stop] == sum(
            weight
            for producer, readers, weight in values
            if first <= producer < stop and any(reader >= stop for reader in readers)
        )
