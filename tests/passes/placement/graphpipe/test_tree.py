from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.placement.graphpipe.series_parallel import (
    Leaf,
    Parallel,
    Series,
    Tree,
    decompose_series_parallel,
    units_in_order,
)


@st.composite
def random_needs(draw: st.DrawFn) -> list[int]:
    """For up to twelve units the earlier ones that each reads from, as bits."""
    count = draw(st.integers(1, 12))
    return [
        draw(st.integers(0, 2**unit - 1)) & draw(st.integers(0, 2**unit - 1))
        for unit in range(count)
    ]


@st.composite
def series_parallel_needs(draw: st.DrawFn) -> list[int]:
    """The same for a graph made of parts in series, where what follows reads from all ends, and in
    parallel.
    """

    def grow(first: int, depth: int) -> tuple[list[int], int, int]:
        """Needs of the units from `first` on; the sources and the ends, as bits."""
        kind = draw(st.sampled_from(["leaf", "series", "parallel"])) if depth else "leaf"
        if kind == "leaf":
            return [0], 1 << first, 1 << first
        needs: list[int] = []
        sources = ends = 0
        for part in range(draw(st.integers(2, 3))):
            more, begin, end = grow(first + len(needs), depth - 1)
            if kind == "series" and part:
                more = [
                    need | (ends if begin >> (first + len(needs) + place) & 1 else 0)
                    for place, need in enumerate(more)
                ]
                ends = end
            else:
                sources = sources | begin
                ends = ends | end
            needs += more
        return needs, sources, ends

    return grow(0, 3)[0]


def above(needs: list[int]) -> list[int]:
    found: list[int] = []
    for need in needs:
        found.append(need)
        for other, before in enumerate(found[:-1]):
            if need >> other & 1:
                found[-1] |= before
    return found


def parts_of(tree: Tree) -> list[Series | Parallel]:
    if isinstance(tree, Leaf):
        return []
    return [tree, *itertools.chain.from_iterable(map(parts_of, tree.parts))]


@given(random_needs())
def test_leaves_are_a_topological_order_of_all_units(needs: list[int]) -> None:
    order = units_in_order(decompose_series_parallel(needs, [1.0] * len(needs))[0])
    assert sorted(order) == list(range(len(needs)))
    seen = 0
    for unit in order:
        assert not needs[unit] & ~seen
        seen |= 1 << unit


@given(random_needs())
def test_prefixes_in_series_and_branches_are_convex(needs: list[int]) -> None:
    waits = above(needs)
    for part in parts_of(decompose_series_parallel(needs, [1.0] * len(needs))[0]):
        groups = [set(units_in_order(each)) for each in part.parts]
        if isinstance(part, Series):
            groups = [
                set(itertools.chain.from_iterable(groups[:stop])) for stop in range(1, len(groups))
            ]
        for group in groups:
            below = {
                unit for unit in range(len(needs)) if any(waits[unit] >> one & 1 for one in group)
            } - group
            assert not any(waits[one] >> unit & 1 for one in group for unit in below)


@given(random_needs())
def test_parts_are_related_as_the_tree_says_but_within_the_regions_it_names(
    needs: list[int],
) -> None:
    waits = above(needs)
    tree, found = decompose_series_parallel(needs, [1.0] * len(needs))
    regions = [set(region) for region in found]
    for part in parts_of(tree):
        for first, second in itertools.combinations(part.parts, 2):
            for one, other in itertools.product(units_in_order(first), units_in_order(second)):
                ordered = waits[other] >> one & 1 or any(
                    {one, other} <= region for region in regions
                )
                assert ordered if isinstance(part, Series) else not waits[other] >> one & 1


@given(series_parallel_needs())
def test_a_series_parallel_graph_has_no_other_region(needs: list[int]) -> None:
    assert decompose_series_parallel(needs, [1.0] * len(needs))[1] == ()


def test_a_residual_connection_is_no_branch() -> None:
    tree = decompose_series_parallel([0b0, 0b1, 0b10, 0b101], [1.0] * 4)[0]
    assert tree == Series((Leaf(0), Leaf(1), Leaf(2), Leaf(3)))


BESIDE = Series((Parallel((Leaf(0), Leaf(1))), Parallel((Leaf(2), Leaf(3))), Leaf(4)))
BEHIND = Series((Parallel((Series((Leaf(0), Leaf(2))), Leaf(1))), Leaf(3), Leaf(4)))


@pytest.mark.parametrize(("weights", "tree"), [([9, 9, 1, 9], BESIDE), ([9, 9, 9, 1], BEHIND)])
def test_a_region_that_is_not_series_parallel_loses_little(
    weights: list[float], tree: Tree
) -> None:
    """2 reads from 0, and 3 from 0 and 1: either 2 waits for 1, or 3 for 2, which matters where
    both are heavy.
    """
    assert decompose_series_parallel([0, 0, 0b1, 0b11, 0b1100], [*weights, 1.0]) == (
        tree,
        ((0, 1, 2, 3),),
    )
