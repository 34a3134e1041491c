"""Configurations against their definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.placement.pase.paper_costs import (
    enumerate_configurations,
    has_contiguous_parts,
)

EXTENTS = st.lists(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 64, 255]), max_size=4)


@given(EXTENTS, st.integers(1, 24), st.sampled_from([1, 4]))
def test_all_divisors_within_the_devices(extents: list[int], devices: int, cutoff: int) -> None:
    choices = [
        [c for c in range(1, n + 1) if n % c == 0 and n / c >= cutoff] or [1] for n in extents
    ]
    expected = [each for each in itertools.product(*choices) if math.prod(each) <= devices]
    assert [tuple(row) for row in enumerate_configurations(extents, devices, cutoff)] == expected


@given(EXTENTS.filter(lambda extents: math.prod(extents) <= 500))
def test_contiguous_pieces(extents: list[int]) -> None:
    degrees = enumerate_configurations(extents, math.prod(extents), 1)
    assert has_contiguous_parts(degrees, extents).tolist() == [
        _is_contiguous(extents, row.tolist()) for row in degrees
    ]


def _is_contiguous(extents: list[int], degrees: list[int]) -> bool:
    """Whether the first device's elements, numbered row-major, follow one another."""
    numbers = np.arange(math.prod(extents)).reshape(extents)
    box = numbers[tuple(slice(n // c) for n, c in zip(extents, degrees, strict=True))].reshape(-1)
    return bool((np.diff(box) == 1).all())
