from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.partition.downsets import Downsets, count_downsets


@st.composite
def needs(draw: st.DrawFn) -> tuple[int, ...]:
    """What up to seven blocks need, in topological order."""
    count = draw(st.integers(0, 7))
    return tuple(draw(st.integers(0, (1 << block) - 1)) for block in range(count))


@given(needs())
def test_all_downsets_and_pairs_are_found_and_counted(needs: tuple[int, ...]) -> None:
    masks = [
        held
        for held in range(1 << len(needs))
        if all(not held >> block & 1 or need & ~held == 0 for block, need in enumerate(needs))
    ]
    found = Downsets(needs)
    own = [sum(1 << block for block in np.flatnonzero(row)) for row in found.holds]
    assert sorted(own) == masks and count_downsets(needs) == len(masks)
    pairs = {
        (own[inner], own[outer]) for inner, outer in zip(found.inner, found.outer, strict=True)
    }
    assert pairs == {
        (inner, outer)
        for inner in masks
        for outer in masks
        if inner != outer and inner & ~outer == 0
    }
    assert len(pairs) == len(found.inner)
    sizes = found.holds.sum(axis=1)
    for level, (first, stop) in enumerate(zip(found.levels, found.levels[1:], strict=False)):
        assert set(sizes[first:stop]) == {len(needs) - level}
        part = found.inner[found.starts[level] : found.starts[level + 1]]
        assert np.all((first <= part) & (part < stop)) and np.all(np.diff(part) >= 0)


def test_many_downsets_are_counted_without_listing_them() -> None:
    branches = 16
    layers = 4
    chain = [0 if layer == 0 else 1 << layer - 1 for layer in range(layers)]
    needs = tuple(need << branch * layers for branch in range(branches) for need in chain)
    assert count_downsets((*needs, (1 << branches * layers) - 1)) == 5**16 + 1


def test_more_than_64_blocks_are_one_chain() -> None:
    found = Downsets(tuple(1 << block - 1 if block else 0 for block in range(70)))
    assert found.holds.shape == (71, 70)
    assert len(found.inner) == 70 * 71 // 2
