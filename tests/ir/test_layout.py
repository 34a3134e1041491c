"""Boxes and layouts against sets of indices."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from autopipe.ir.layout import Box, Layout, Partial, is_block, operand_layout, replicated, result_layout, whole
from autopipe.ir.placement import Split
from autopipe.ir.space import parse

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def points(box: Box) -> set[tuple[int, ...]]:
    """Every index of a box."""
    ranges = (range(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
    return set(itertools.product(*ranges))


@st.composite
def boxes(draw: st.DrawFn, rank: int) -> Box:
    starts = [draw(st.integers(0, 4)) for _ in range(rank)]
    return Box(tuple(starts), tuple(start + draw(st.integers(1, 4)) for start in starts))


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_common_points(pair: tuple[Box, Box]) -> None:
    first, second = pair
    common = first.intersect(second)
    assert (set() if common is None else points(common)) == points(first) & points(second)
    assert common == second.intersect(first)


@given(st.integers(0, 3).flatmap(boxes))
def test_extents_and_elements(box: Box) -> None:
    assert box.elements == len(points(box)) == math.prod(box.shape)


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_relative_coordinates_name_the_same_elements(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    inner = outer.intersect(other)
    assume(inner is not None)
    assert inner is not None
    tensor = np.arange(9**3).reshape(9, 9, 9)[(slice(None),) * len(outer.starts) + (0,) * (3 - len(outer.starts))]

    def part(array: np.ndarray, box: Box) -> np.ndarray:
        return array[tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))]

    assert np.array_equal(part(part(tensor, outer), inner.within(outer)), part(tensor, inner))


@given(SHAPES)
def test_the_whole_tensor(shape: tuple[int, ...]) -> None:
    assert points(whole(shape)) == set(itertools.product(*map(range, shape)))
    layout = replicated(shape)
    assert layout.is_whole
    assert layout.local_shape() == shape
    assert {layout.box(position, 6) for position in range(6)} == {whole(shape)}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout of a tensor and the size of its group: some dimensions cut, perhaps twice, perhaps with copies left."""
    degrees = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3)))
    shape = draw(SHAPES)
    cuts: list[list[int]] = [[] for _ in shape]
    for position in range(len(degrees)):
        target = draw(st.integers(-1, len(shape) - 1))
        if target >= 0:
            cuts[target].append(position)
    scaled = tuple(extent * math.prod(degrees[cut] for cut in each) for extent, each in zip(shape, cuts, strict=True))
    return Layout(scaled, degrees, tuple(map(tuple, cuts))), math.prod(degrees) * draw(st.integers(1, 2))


@given(layouts())
def test_the_boxes_of_a_group_cover_the_tensor_in_equal_numbers(case: tuple[Layout, int]) -> None:
    layout, group = case
    held = [layout.box(position, group) for position in range(group)]
    assert {box.shape for box in held} == {layout.local_shape()}
    times = np.zeros(layout.shape, int)
    for box in held:
        for point in points(box):
            times[point] += 1
    assert (times == group // math.prod(layout.degrees[cut] for each in layout.cuts for cut in each)).all()


@given(layouts())
def test_places_along_the_splits_count_the_group_outer_to_inner(case: tuple[Layout, int]) -> None:
    layout, group = case
    copies = group // math.prod(layout.degrees)
    expected = [place for place in itertools.product(*map(range, layout.degrees)) for _ in range(copies)]
    assert [layout.coordinates(position, group) for position in range(group)] == expected


def test_a_product_split_along_its_sum_leaves_partial_results() -> None:
    space = parse("m k+, k n -> m n", ((4, 6), (6, 8)), ((4, 8),))
    splits = (Split("k", 2),)
    assert result_layout(space, space.results[0] or (), (4, 8), splits).partial is Partial.SUM
    left = operand_layout(space, space.operands[0] or (), (4, 6), splits)
    assert [left.box(position, 2) for position in range(2)] == [Box((0, 0), (4, 3)), Box((0, 3), (4, 6))]
    rows = result_layout(space, space.results[0] or (), (4, 8), (Split("m", 2),))
    assert rows.partial is None
    assert rows.box(1, 2) == Box((2, 0), (4, 8))


def test_a_mean_split_leaves_means() -> None:
    space = parse("a b~ -> a", ((4, 6),), ((4,),))
    assert result_layout(space, space.results[0] or (), (4,), (Split("b", 3),)).partial is Partial.MEAN
    assert result_layout(space, space.results[0] or (), (4,), (Split("a", 2),)).partial is None


@st.composite
def merged(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Extents of the axes of one dimension, the place of one of them, and a degree."""
    extents = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return extents, draw(st.integers(0, len(extents) - 1)), draw(st.integers(2, 4))


@given(merged())
def test_a_share_of_an_axis_is_a_block_where_its_indices_are_neighbours(case: tuple[tuple[int, ...], int, int]) -> None:
    extents, place, degree = case
    names = [f"a{index}" for index in range(len(extents))]
    dimension = f"({' '.join(names)})"
    size = math.prod(extents)
    space = parse(f"{dimension} -> {dimension}", ((size,),), ((size,),), dict(zip(names, extents, strict=True)))
    found = is_block(space, names[place], degree)
    if extents[place] % degree:
        assert not found
        return
    index = np.arange(size).reshape(extents)
    parts = [np.sort(part.ravel()) for part in np.split(index, degree, place)]
    assert found == all((np.diff(part) == 1).all() for part in parts)
