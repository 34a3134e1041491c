"""Random splits over random devices, found again from who holds which part."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.layout import mesh_axes_of
from autopipe.ir.placement import Split
from autopipe.passes.annotations import AxisSplit, Cuts, consistent_device_order, splits_over
from autopipe.passes.frontend.device_annotations import Sharding

DEGREES = st.lists(st.sampled_from([2, 2, 3, 4]), max_size=3)


def cuts_by(splits: tuple[Split, ...], devices: tuple[int, ...]) -> Cuts:
    """Who holds which part under `splits` over `devices` in this order."""
    mesh = mesh_axes_of(splits, len(devices))
    return tuple(
        AxisSplit(
            split.axis,
            split.degree,
            tuple(axis.coordinate(devices.index(device)) for device in sorted(devices)),
        )
        for split, axis in zip(splits, mesh, strict=True)
    )


@given(DEGREES, st.integers(1, 3), st.randoms())
def test_splits_are_found_again(degrees: list[int], copies: int, random: object) -> None:
    splits = tuple(Split(f"a{index}", degree) for index, degree in enumerate(degrees))
    devices = list(range(0, 2 * math.prod(degrees) * copies, 2))
    random.shuffle(devices)  # type: ignore[attr-defined]
    cuts = list(cuts_by(splits, tuple(devices)))
    random.shuffle(cuts)  # type: ignore[attr-defined]
    assert splits_over(devices, tuple(cuts)) == splits


def test_parts_that_no_splits_make() -> None:
    assert splits_over((0, 1, 2, 3), (AxisSplit("a", 2, (0, 1, 1, 0)),)) is None, "not in order"
    assert splits_over((0, 1, 2, 3), (AxisSplit("a", 2, (0, 1, 0, 1)),)) is None, (
        "the copies would be outermost"
    )
    assert splits_over((0, 1, 2, 3), (AxisSplit("a", 2, (0, 0, 0, 1)),)) is None, (
        "unequal numbers of copies"
    )
    assert (
        splits_over(
            (0, 1, 2, 3), (AxisSplit("a", 4, (0, 1, 2, 3)), AxisSplit("b", 2, (0, 1, 0, 1)))
        )
        is None
    ), "too many parts"
    assert splits_over((0, 1, 2), (AxisSplit("a", 2, (0, 0, 1)),)) is None, (
        "two do not divide three"
    )


def test_an_order_does_for_all_nodes_of_a_stage() -> None:
    listed = Sharding("t", ((0, 4),), ((3,), (1,), (2,), (0,)))
    by_four = AxisSplit("a", 4, (3, 1, 2, 0))
    by_two = AxisSplit("b", 2, (1, 0, 1, 0))
    assert consistent_device_order([listed], [(by_four,), (by_two,)]) == (3, 1, 2, 0)
    assert (
        consistent_device_order([listed], [(by_four,), (AxisSplit("b", 2, (0, 0, 1, 1)),)]) is None
    )


def test_copies_keep_the_order_in_which_they_are_listed() -> None:
    assert consistent_device_order([Sharding("t", (), ((2, 0, 1),))], [()]) == (2, 0, 1)
    halves = Sharding("t", ((0, 2),), ((1, 0), (3, 2)))
    assert consistent_device_order([halves], [(AxisSplit("a", 2, (0, 0, 1, 1)),)]) == (1, 0, 3, 2)
