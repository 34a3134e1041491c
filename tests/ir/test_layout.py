"""Boxes and layouts against sets of indices."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from autopipe.ir.layout import (
    Layout,
    MeshAxis,
    TensorSlice,
    WindowedShards,
    are_even_splits,
    full_slice,
    group_members,
    is_even_split,
    mesh_axes_of,
    mesh_axis_by_name,
    operand_layout,
    replicated_layout,
    result_layout,
    shard_copies,
    total_degree,
)
from autopipe.ir.placement import Split
from autopipe.ir.space import Windowed, parse_notation

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def points(box: TensorSlice) -> set[tuple[int, ...]]:
    """Every index of a box."""
    ranges = (range(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
    return set(itertools.product(*ranges))


@st.composite
def boxes(draw: st.DrawFn, rank: int) -> TensorSlice:
    starts = [draw(st.integers(0, 4)) for _ in range(rank)]
    return TensorSlice(tuple(starts), tuple(start + draw(st.integers(1, 4)) for start in starts))


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_common_points(pair: tuple[TensorSlice, TensorSlice]) -> None:
    first, second = pair
    common = first.intersect(second)
    assert (set() if common is None else points(common)) == points(first) & points(second)
    assert common == second.intersect(first)


@given(st.integers(0, 3).flatmap(boxes))
def test_extents_and_elements(box: TensorSlice) -> None:
    assert box.elements == len(points(box)) == math.prod(box.shape)


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_relative_coordinates_name_the_same_elements(pair: tuple[TensorSlice, TensorSlice]) -> None:
    outer, other = pair
    inner = outer.intersect(other)
    assume(inner is not None)
    assert inner is not None
    tensor = np.arange(9**3).reshape(9, 9, 9)[
        (slice(None),) * len(outer.starts) + (0,) * (3 - len(outer.starts))
    ]

    def part(array: np.ndarray, box: TensorSlice) -> np.ndarray:
        return array[tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))]

    assert np.array_equal(part(part(tensor, outer), inner.relative_to(outer)), part(tensor, inner))


@given(SHAPES)
def test_the_whole_tensor(shape: tuple[int, ...]) -> None:
    assert points(full_slice(shape)) == set(itertools.product(*map(range, shape)))
    layout = replicated_layout(shape)
    assert not layout.is_partial and not any(layout.shard_axes)
    assert layout.local_shape() == shape
    assert {layout.shard(position) for position in range(6)} == {full_slice(shape)}


SPACE = parse_notation("a b -> a b", ((36, 36),), ((36, 36),))


@st.composite
def configurations(draw: st.DrawFn) -> tuple[tuple[Split, ...], int]:
    """Splits of SPACE in either order, and the size of a group that perhaps has copies left
    over.
    """
    splits = tuple(
        Split(axis, draw(st.sampled_from([1, 2, 3, 4, 6]))) for axis in draw(st.permutations("ab"))
    )
    return splits, math.prod(split.degree for split in splits) * draw(st.integers(1, 3))


def layout_of(splits: tuple[Split, ...], group: int) -> Layout:
    return operand_layout(SPACE.operands[0] or (), (36, 36), mesh_axis_by_name(splits, group))


@given(configurations())
def test_the_boxes_of_a_group_cover_the_tensor_in_equal_numbers(
    case: tuple[tuple[Split, ...], int],
) -> None:
    splits, group = case
    layout = layout_of(splits, group)
    held = [layout.shard(position) for position in range(group)]
    assert {box.shape for box in held} == {layout.local_shape()}
    times = np.zeros(layout.shape, int)
    for box in held:
        times[tuple(map(slice, box.starts, box.stops))] += 1
    assert (times == group // layout.shard_count).all()
    assert layout.shard_count == math.prod(split.degree for split in splits)


@given(configurations())
def test_slices_of_copies_cover_the_tensor_once_each_inside_of_its_copy(
    case: tuple[tuple[Split, ...], int],
) -> None:
    splits, group = case
    layout = layout_of(splits, group)
    slices = shard_copies(layout, group)
    copies = group // layout.shard_count
    if all(extent % copies for extent in layout.local_shape()):
        assert slices == layout
        return
    assert slices.shard_count == group
    times = np.zeros(layout.shape, int)
    for position in range(group):
        times[tuple(map(slice, slices.shard(position).starts, slices.shard(position).stops))] += 1
        assert slices.shard(position).intersect(layout.shard(position)) == slices.shard(position)
    assert (times == 1).all()


@given(configurations())
def test_places_along_the_splits_count_the_group_outer_to_inner(
    case: tuple[tuple[Split, ...], int],
) -> None:
    splits, group = case
    degrees = [split.degree for split in splits]
    expected = [
        p
        for p in itertools.product(*map(range, degrees))
        for _ in range(group // math.prod(degrees))
    ]
    mesh = mesh_axes_of(splits, group)
    assert [
        tuple(axis.coordinate(position) for axis in mesh) for position in range(group)
    ] == expected


@given(configurations(), configurations())
def test_layouts_are_equal_where_they_mean_the_same(
    first: tuple[tuple[Split, ...], int], second: tuple[tuple[Split, ...], int]
) -> None:
    group = math.lcm(first[1], second[1])
    one = layout_of(first[0], group)
    other = layout_of(second[0], group)
    assert (one == other) == all(
        one.shard(position) == other.shard(position) for position in range(group)
    )


@given(configurations(), st.integers(0, 100))
def test_members_along_axes_are_in_their_order(
    case: tuple[tuple[Split, ...], int], start: int
) -> None:
    splits, group = case
    mesh = mesh_axes_of(splits, group)
    position = start % group
    for count in range(len(mesh) + 1):
        along = group_members(mesh[:count], position)
        places = [tuple(axis.coordinate(each) for axis in mesh[:count]) for each in along]
        assert places == list(itertools.product(*(range(axis.degree) for axis in mesh[:count])))
        rest = total_degree(mesh[:count])
        assert {
            each - sum(axis.coordinate(each) * axis.stride for axis in mesh[:count])
            for each in along
        } == {position - sum(axis.coordinate(position) * axis.stride for axis in mesh[:count])}
        assert len(set(along)) == rest


def test_a_product_split_along_its_sum_leaves_partial_results() -> None:
    space = parse_notation("m k+, k n -> m n", ((4, 6), (6, 8)), ((4, 8),))
    splits = (Split("m", 2), Split("k", 2))
    found = result_layout(space, space.results[0] or (), (4, 8), mesh_axis_by_name(splits, 4))
    assert found.sums == (MeshAxis(2, 1),)
    assert found.shard_axes == ((MeshAxis(2, 2),), ())
    left = operand_layout(space.operands[0] or (), (4, 6), mesh_axis_by_name(splits, 4))
    assert [left.shard(position) for position in (0, 1, 2)] == [
        TensorSlice((0, 0), (2, 3)),
        TensorSlice((0, 3), (2, 6)),
        TensorSlice((2, 0), (4, 3)),
    ]
    assert not result_layout(
        space, space.results[0] or (), (4, 8), mesh_axis_by_name((Split("m", 2),), 2)
    ).is_partial


def test_a_mean_split_leaves_means() -> None:
    space = parse_notation("a b~ c& -> a", ((4, 6, 8),), ((4,),))
    assert result_layout(
        space, space.results[0] or (), (4,), mesh_axis_by_name((Split("b", 3),), 3)
    ).means == (MeshAxis(3, 1),)
    both = result_layout(
        space, space.results[0] or (), (4,), mesh_axis_by_name((Split("b", 3), Split("c", 2)), 6)
    )
    assert (both.means, both.sums) == ((MeshAxis(3, 2),), (MeshAxis(2, 1),))
    assert both.partial_over == (MeshAxis(3, 2), MeshAxis(2, 1)), "the two kinds are not merged"


@st.composite
def merged(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Extents of the axes of one dimension, the place of one of them, and a degree."""
    extents = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return extents, draw(st.integers(0, len(extents) - 1)), draw(st.integers(2, 4))


@given(merged())
def test_a_share_of_an_axis_is_a_block_where_its_indices_are_neighbours(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    extents, place, degree = case
    names = [f"a{index}" for index in range(len(extents))]
    dimension = f"({' '.join(names)})"
    size = math.prod(extents)
    space = parse_notation(
        f"{dimension} -> {dimension}",
        ((size,),),
        ((size,),),
        dict(zip(names, extents, strict=True)),
    )
    found = is_even_split(space, names[place], degree)
    if extents[place] % degree:
        assert not found
        return
    index = np.arange(size).reshape(extents)
    parts = [np.sort(part.ravel()) for part in np.split(index, degree, place)]
    assert found == all((np.diff(part) == 1).all() for part in parts)


@st.composite
def sliding(draw: st.DrawFn) -> tuple[Windowed, int, int]:
    """Windows over a dimension, its extent, and a degree that divides their number."""
    degree = draw(st.integers(1, 4))
    count = degree * draw(st.integers(1, 3))
    stride = draw(st.integers(1, 3))
    reach = draw(st.integers(1, 4))
    offset = draw(st.integers(-3, 1))
    span = (count - 1) * stride + reach + offset
    return (
        Windowed(0, 0, "o", count, stride, offset, reach, -1.0),
        max(1, span - draw(st.integers(-2, 2))),
        degree,
    )


@given(sliding(), st.integers(1, 2))
def test_a_block_is_what_its_windows_read(case: tuple[Windowed, int, int], copies: int) -> None:
    windowed, extent, degree = case
    layout = operand_layout(
        ((),), (extent,), mesh_axis_by_name((Split("o", degree),), degree * copies), (windowed,)
    )
    read = [range(i * windowed.stride + windowed.offset, i * windowed.stride + windowed.offset + windowed.reach)
            for i in range(windowed.count)]  # fmt: skip
    share = windowed.count // degree
    out = False
    for position in range(degree * copies):
        place = position // copies
        own = read[place * share : (place + 1) * share]
        box = layout.shard(position)
        assert box.shape == layout.local_shape()
        if degree > 1:
            assert (box.starts[0], box.stops[0]) == (own[0].start, own[-1].stop)
            out |= box.starts[0] < 0 or box.stops[0] > extent
    assert (layout == replicated_layout(layout.shape)) == (degree == 1)
    assert layout.fill == (-1.0 if out else 0.0)
    even = layout.with_even_shards()
    assert even.windows == ()
    assert even.shard_count == (
        degree if degree == 1 or not layout.windows or extent % degree == 0 else 1
    )


@given(sliding(), sliding())
def test_windows_are_equal_where_they_read_the_same(
    first: tuple[Windowed, int, int], second: tuple[Windowed, int, int]
) -> None:
    extent = first[1]
    degree = first[2]
    assume(second[0].count % degree == 0)
    axes = mesh_axis_by_name((Split("o", degree),), degree)
    one, other = (operand_layout(((),), (extent,), axes, (each,)) for each in (first[0], second[0]))
    assert (one == other) == all(
        one.shard(position) == other.shard(position) for position in range(degree)
    )


def test_windows_that_read_even_blocks_are_these() -> None:
    halved = operand_layout(
        ((),), (8,), mesh_axis_by_name((Split("o", 2),), 2), (Windowed(0, 0, "o", 4, 2, 0, 2),)
    )
    assert halved == operand_layout((("o",),), (8,), mesh_axis_by_name((Split("o", 2),), 2))
    wider = operand_layout(
        ((),), (9,), mesh_axis_by_name((Split("o", 2),), 2), (Windowed(0, 0, "o", 4, 2, 0, 2),)
    )
    assert wider.windows == (WindowedShards(4, 0, 4),)
    assert wider.with_even_shards() == replicated_layout(wider.shape)


def test_an_inner_axis_may_be_cut_where_the_outer_one_is_down_to_one() -> None:
    space = parse_notation("(a b) -> (a b)", ((24,),), ((24,),), {"a": 4, "b": 6})
    assert are_even_splits(space, (Split("a", 4), Split("b", 3)))
    assert not are_even_splits(space, (Split("a", 2), Split("b", 3)))
    layout = operand_layout(
        space.operands[0] or (), (24,), mesh_axis_by_name((Split("a", 4), Split("b", 3)), 12)
    )
    assert [layout.shard(position).starts for position in range(12)] == [
        (2 * position,) for position in range(12)
    ]
