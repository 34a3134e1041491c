"""Table 2 of GraphPipe: its rows cover everything and agree, and their figures are what pipelines
need.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.cost.memory import (
    graphpipe_table_2,
    in_flight_samples,
    in_flight_samples_by_stage,
)

ROWS = (
    (lambda m, b, c, x, y: m < x < y, lambda m, b, c, x, y: 2 * m),
    (lambda m, b, c, x, y: m == x < y, lambda m, b, c, x, y: m),
    (lambda m, b, c, x, y: b <= c < y < x, lambda m, b, c, x, y: x - y + 2 * c),
    (lambda m, b, c, x, y: b <= c == y < x, lambda m, b, c, x, y: x),
    (lambda m, b, c, x, y: c <= b < y < x, lambda m, b, c, x, y: x - y + 2 * b),
    (lambda m, b, c, x, y: c <= b == y < x, lambda m, b, c, x, y: x),
    (lambda m, b, c, x, y: m == y == x, lambda m, b, c, x, y: y),
    (lambda m, b, c, x, y: m < y == x, lambda m, b, c, x, y: 2 * m),
    (lambda m, b, c, x, y: b <= x < c <= y, lambda m, b, c, x, y: c),
    (lambda m, b, c, x, y: c <= y < b <= x, lambda m, b, c, x, y: x - y + b),
)
"""Condition and figure, beside the successor's, of each row; b, c are sizes, m the larger, x, y
those times k.
"""


def test_the_rows_cover_everything_and_agree_where_they_overlap():
    for k, size, next_k, next_size in itertools.product(range(1, 9), repeat=4):
        figures = max(size, next_size), size, next_size, k * size, next_k * next_size
        found = {figure(*figures) for condition, figure in ROWS if condition(*figures)}
        assert found == {graphpipe_table_2(k, size, next_k, next_size, 5) - 5}


def test_the_papers_example():
    chain = ((0, 1), (1, 2))
    assert in_flight_samples_by_stage((1, 1, 1), (1, 2, 4), chain) == (10, 8, 4)
    assert in_flight_samples_by_stage((1, 1, 1), (4, 4, 4), chain) == (12, 8, 4)


def test_the_most_that_a_successor_asks():
    assert in_flight_samples_by_stage((1,) * 4, (1,) * 4, ((0, 1), (0, 3), (1, 2), (2, 3))) == (
        4,
        3,
        2,
        1,
    )


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 6))
def test_one_forward_one_backward_asks_least(power, next_k, next_power, rounds):
    # Appendix A.1 takes the k of which the figure is least: that is always 1.
    size = 2**power
    next_size = 2**next_power
    figures = [
        graphpipe_table_2(k, size, next_k, next_size, rounds * next_k * next_size)
        for k in range(1, 17)
    ]
    assert min(figures) == figures[0]


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 4), repeat=2)))
def test_the_table_is_rounded_only_to_whole_micro_batches(sizes):
    size, next_size = sizes
    for k, next_k in itertools.product((1, 2, 4), repeat=2):
        for rounds in range(1, 5):
            before = rounds * next_k * next_size
            exact = graphpipe_table_2(k, size, next_k, next_size, before)
            assert (
                in_flight_samples(k, size, next_k, next_size, before)
                == math.ceil(exact / size) * size
            )
