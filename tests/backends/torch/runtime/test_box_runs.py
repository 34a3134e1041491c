"""Runs of a block: together they are its elements, in order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.parameters import contiguous_ranges
from autopipe.ir.layout import Box


@given(st.data())
def test_runs_are_the_block(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    starts = tuple(data.draw(st.integers(0, extent)) for extent in shape)
    stops = tuple(data.draw(st.integers(start, extent)) for start, extent in zip(starts, shape, strict=True))
    runs = contiguous_ranges(shape, Box(starts, stops))
    places = runs.places(0, runs.count)
    found = (places[:, None] + np.arange(runs.length)).reshape(-1)
    block = np.arange(math.prod(shape)).reshape(shape)[tuple(map(slice, starts, stops))]
    assert found.tolist() == block.reshape(-1).tolist()
    if block.size:
        assert not (np.diff(places) == runs.length).all() or runs.count == 1, "neighbours are one run"


@pytest.mark.parametrize(
    ("stops", "length", "counts"),
    [((6, 4, 3), 72, ()), ((2, 4, 3), 24, ()), ((6, 2, 3), 6, (6,)), ((6, 4, 1), 1, (6, 4)), ((1, 1, 2), 2, (1, 1))],
)
def test_runs_are_as_long_as_can_be(stops: tuple[int, ...], length: int, counts: tuple[int, ...]) -> None:
    runs = contiguous_ranges((6, 4, 3), Box((0, 0, 0), stops))
    assert (runs.length, runs.counts) == (length, counts)
