from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.layout import are_even_splits
from autopipe.ir.placement import Split
from autopipe.ir.space import parse_notation
from autopipe.passes.sharding.configurations import configurations


def test_all_configurations_of_a_matmul_on_four_devices() -> None:
    space = parse_notation("m k+, k n -> m n", ((8, 6), (6, 2)), ((8, 2),))
    found = configurations(space, 4)
    assert found[0] == ()
    assert set(found) == {
        (),
        *((Split(axis, 2),) for axis in "mkn"),
        (Split("m", 4),),
        (Split("m", 2), Split("k", 2)),
        (Split("m", 2), Split("n", 2)),
        (Split("k", 2), Split("n", 2)),
    }, "six and two are not shared by four, and orders other than the space's are not tried"


def test_the_sample_axis_is_split_outermost() -> None:
    space = parse_notation("m k+, k n -> m n", ((4, 4), (4, 4)), ((4, 4),))
    assert (Split("n", 2), Split("m", 2)) in configurations(space, 4, outermost="n")
    assert (Split("m", 2), Split("n", 2)) not in configurations(space, 4, outermost="n")


def test_unsplittable_axes_are_not_split() -> None:
    space = parse_notation("a b! -> a b!", ((4, 4),), ((4, 4),))
    assert configurations(space, 4) == ((), (Split("a", 2),), (Split("a", 4),))


def test_an_inner_axis_of_a_merged_dimension_is_split_only_if_the_outer_has_local_size_one() -> (
    None
):
    space = parse_notation("(a b) -> a b", ((6,),), ((2, 3),))
    assert set(configurations(space, 6)) == {(), (Split("a", 2),), (Split("a", 2), Split("b", 3))}


@pytest.mark.parametrize("group", [1, 5, 6, 7, 12])
def test_any_number_of_devices(group: int) -> None:
    space = parse_notation("m k+, k n -> m n", ((60, 84), (84, 35)), ((60, 35),))
    found = configurations(space, group)
    assert len(set(found)) == len(found)
    assert any(len(splits) == 1 and splits[0].degree == group for splits in found) == (group > 1)


@given(st.tuples(*[st.integers(1, 12)] * 3), st.integers(1, 12))
def test_configurations_are_all_executable_splits(
    extents: tuple[int, int, int], group: int
) -> None:
    m, k, n = extents
    space = parse_notation("m k+, k n -> m n", ((m, k), (k, n)), ((m, n),))
    degrees = (
        [Split(axis, degree) for axis, degree in zip("mkn", each, strict=True) if degree > 1]
        for each in ((a, b, c) for a in range(1, 13) for b in range(1, 13) for c in range(1, 13))
        if group % (each[0] * each[1] * each[2]) == 0
    )
    assert set(configurations(space, group)) == {
        tuple(each) for each in degrees if are_even_splits(space, each)
    }
