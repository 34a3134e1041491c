"""Changes of layout against a simulation of their steps on numpy blocks: every position gets its
block.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    MeshAxis,
    Redistribution,
    TensorSlice,
    WindowedShards,
    merge_axes,
    missing_elements,
    slice_transfers,
    total_degree,
)
from autopipe.passes.analysis.resharding import redistribution_steps, reduction_steps

GROUPS = st.sampled_from([2, 3, 4, 6, 8, 12])
Blocks = list[np.ndarray]
"""What each position of a group holds."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layouts of one tensor over a group."""

    group: int
    source: Layout
    target: Layout


def mesh(draw: st.DrawFn, group: int) -> list[MeshAxis]:
    """The group's size as a product in random order: one axis a factor, outer to inner."""
    found = []
    stride = group
    while stride > 1:
        degree = draw(
            st.sampled_from([each for each in range(2, stride + 1) if stride % each == 0])
        )
        stride //= degree
        found.append(MeshAxis(degree, stride))
    return found


def layout(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    group: int,
    partial: bool = False,
    windowed: bool = False,
) -> Layout:
    """Each axis of a random mesh cuts a dimension, in any order, or holds copies, or shares;
    perhaps windows.
    """
    places = [*range(len(shape)), "copies", *(["sums", "means"] if partial else [])]
    axes: dict[object, list[MeshAxis]] = {place: [] for place in places}
    for axis in draw(st.permutations(mesh(draw, group))):
        axes[draw(st.sampled_from(places))].append(axis)
    cuts = tuple(merge_axes(axes[dimension]) for dimension in range(len(shape)))
    sums, means = (
        merge_axes(sorted(axes.get(kind, []), key=lambda axis: -axis.stride))
        for kind in ("sums", "means")
    )
    windows = tuple(
        window(draw, group // total_degree(axes)) if axes and windowed else None for axes in cuts
    )
    return Layout(
        shape, cuts, sums, means, windows if any(windows) else (), FILL if any(windows) else 0.0
    )


FILL = -1.0
"""What no value is."""


def window(draw: st.DrawFn, extent: int) -> WindowedShards | None:
    """What windows read around even blocks of an extent."""
    if draw(st.booleans()):
        return None
    before = draw(st.integers(-1, 2))
    after = draw(st.integers(0, 3))
    return WindowedShards(extent, -before, max(1, extent + before + after))


@st.composite
def pairs(draw: st.DrawFn, partial: bool = False, windowed: bool = False) -> Pair:
    group = draw(GROUPS)
    shape = (group,) * draw(st.integers(1, 3))
    return Pair(
        group, layout(draw, shape, group, partial), layout(draw, shape, group, windowed=windowed)
    )


def part(array: np.ndarray, box: TensorSlice) -> np.ndarray:
    return array[tuple(map(slice, box.starts, box.stops))]


def seen(array: np.ndarray, box: TensorSlice) -> np.ndarray:
    """A block that may stick out of the array."""
    edge = 2 * max(array.shape) + 4
    inner = tuple(start + edge for start in box.starts), tuple(stop + edge for stop in box.stops)
    return part(np.pad(array, edge, constant_values=FILL), TensorSlice(*inner))


def whole(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)


def together(axes: MeshAxes, position: int, group: int) -> list[int]:
    """Positions that differ from one along `axes` alone, in the order of their places."""
    strides = {axis.stride for axis in axes}

    def elsewhere(each: int) -> int:
        return each - sum(axis.coordinate(each) * axis.stride for axis in axes)

    assert len(strides) == len(axes)
    found = [each for each in range(group) if elsewhere(each) == elsewhere(position)]
    return sorted(found, key=lambda each: [axis.coordinate(each) for axis in axes])


def applied(step: Redistribution, held: Blocks, received: Counter[int]) -> Blocks:
    """What each position holds after one step; adds what it receives, in elements."""
    if step.kind == "redistribute":
        return redistributed(step, held, received)
    found = []
    for position in range(len(held)):
        members = together(step.over, position, len(held))
        place = members.index(position)
        size = len(members)
        blocks = [held[each] for each in members]
        if step.result.windows:
            assert step.kind == "slice"
            result = cut_alone(step, held[position], position)
        elif step.kind == "slice":
            result = np.split(held[position], size, step.dimension)[place]
        elif step.kind == "all_gather":
            result = np.concatenate(blocks, step.dimension)
            received[position] += result.size - held[position].size
        elif step.kind == "all_to_all":
            result = np.concatenate(
                [np.split(each, size, step.dimension)[place] for each in blocks], step.origin
            )
            received[position] += result.size - result.size // size
        else:
            total = np.sum(blocks, axis=0) / step.divisor
            assert step.kind in ("all_reduce", "reduce_scatter")
            result = (
                total if step.kind == "all_reduce" else np.split(total, size, step.dimension)[place]
            )
        found.append(result)
    return found


def cut_alone(step: Redistribution, held: np.ndarray, position: int) -> np.ndarray:
    """What one position makes of its own block."""
    have = step.source.shard(position)
    need = step.result.shard(position)
    found = np.full(need.shape, FILL)
    common = have.intersect(need)
    if common is not None:
        part(found, common.relative_to(need))[...] = part(held, common.relative_to(have))
    return found


def redistributed(step: Redistribution, held: Blocks, received: Counter[int]) -> Blocks:
    group = len(held)
    found = [
        np.full(step.result.shard(position).shape, step.result.fill) for position in range(group)
    ]
    untouched = [np.ones(each.shape, bool) for each in found]
    for move in slice_transfers(step.source, step.result, group):
        block = part(held[move.source], move.part.relative_to(step.source.shard(move.source)))
        place = move.part.relative_to(step.result.shard(move.target))
        assert part(untouched[move.target], place).all(), "each element once"
        part(untouched[move.target], place)[...] = False
        part(found[move.target], place)[...] = block
        received[move.target] += block.size * (move.source != move.target)
    return found


def assert_held(held: Blocks, layout: Layout, value: np.ndarray) -> None:
    for position, block in enumerate(held):
        np.testing.assert_allclose(block, seen(value, layout.shard(position)), rtol=1e-12)


@given(pairs() | pairs(windowed=True))
@settings(max_examples=300, deadline=None)
def test_steps_lead_to_the_target_and_move_what_is_lacking(pair: Pair) -> None:
    value = whole(pair.source.shape)
    held = [part(value, pair.source.shard(position)) for position in range(pair.group)]
    received: Counter[int] = Counter()
    form = pair.source
    for step in redistribution_steps(pair.source, pair.target):
        assert step.source == form
        held = applied(step, held, received)
        form = step.result
        assert_held(held, form, value)
    assert form == pair.target
    assert [received[position] for position in range(pair.group)] == list(
        missing_elements(pair.source, pair.target, pair.group)
    )


@given(pairs(partial=True))
@settings(max_examples=300, deadline=None)
def test_reductions_add_up_the_shares(pair: Pair) -> None:
    value = whole(pair.source.shape)
    copies = math.prod(axis.degree for axis in pair.source.sums)
    shares = np.random.default_rng(pair.group).random(pair.group)
    held = []
    for position in range(pair.group):
        adding = together(pair.source.sums, position, pair.group)
        share = shares[position] / sum(shares[each] for each in adding) if copies > 1 else 1.0
        held.append(part(value, pair.source.shard(position)) * share)
    form = pair.source
    for step in reduction_steps(pair.source, pair.target):
        assert step.source == form
        held = applied(step, held, Counter())
        form = step.result
    assert not form.is_partial
    assert_held(held, form, value)
    for now, found, wanted in zip(
        pair.source.shard_axes, form.shard_axes, pair.target.shard_axes, strict=True
    ):
        assert found == now or _begins(Layout((1,), (wanted,)), Layout((1,), (found,)), pair.group)


def _begins(fine: Layout, coarse: Layout, group: int) -> bool:
    """Whether devices in one block of `fine` are in one block of `coarse`: it only goes on
    cutting.
    """
    boxes: dict[int, set[int]] = {}
    for position in range(group):
        index = [0, 0]
        for which, layout in enumerate((fine, coarse)):
            for axis in layout.shard_axes[0]:
                index[which] = index[which] * axis.degree + axis.coordinate(position)
        boxes.setdefault(index[0], set()).add(index[1])
    return all(len(found) == 1 for found in boxes.values())


@given(pairs() | pairs(windowed=True))
@settings(max_examples=200, deadline=None)
def test_each_box_is_sent_once_by_one_that_has_it_and_never_to_one_that_does(pair: Pair) -> None:
    times = [np.zeros(pair.source.shape, int) for _ in range(pair.group)]
    for move in slice_transfers(pair.source, pair.target, pair.group):
        own = pair.source.shard(move.source).intersect(move.part)
        assert own == move.part, "the sender has it"
        if move.source != move.target:
            assert pair.source.shard(move.target).intersect(move.part) is None, (
                "the receiver lacks it"
            )
        part(times[move.target], move.part)[...] += 1
    for position, found in enumerate(times):
        wanted = pair.target.shard(position).intersect(
            TensorSlice((0,) * len(found.shape), found.shape)
        )
        assert found.sum() == (0 if wanted is None else wanted.elements)
        assert wanted is None or (part(found, wanted) == 1).all()


def test_what_a_transposed_cut_takes_is_one_exchange() -> None:
    shape = (4, 4)
    rows, columns = (
        Layout(shape, cuts) for cuts in (((MeshAxis(4, 1),), ()), ((), (MeshAxis(4, 1),)))
    )
    assert [step.kind for step in redistribution_steps(rows, columns)] == ["all_to_all"]
    assert [step.kind for step in redistribution_steps(rows, Layout(shape, ((), ())))] == [
        "all_gather"
    ]
    assert [step.kind for step in redistribution_steps(Layout(shape, ((), ())), rows)] == ["slice"]
    around = Layout(shape, ((MeshAxis(4, 1),), ()), windows=(WindowedShards(1, -1, 3), None))
    assert [step.kind for step in redistribution_steps(rows, around)] == ["redistribute"]
    assert list(missing_elements(rows, around, 4)) == [4, 8, 8, 4], (
        "a row of each neighbour there is"
    )
    assert [step.kind for step in redistribution_steps(Layout(shape, ((), ())), around)] == [
        "slice"
    ]
    turned = Layout(shape, ((MeshAxis(2, 1), MeshAxis(2, 2)), ()))
    assert [step.kind for step in redistribution_steps(rows, turned)] == ["redistribute"]


def test_places_of_a_mesh_name_each_device_once() -> None:
    axes = (MeshAxis(2, 6), MeshAxis(3, 1))
    assert list(itertools.chain(*[together(axes, start, 12) for start in (0, 3)])) == [
        0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11,
    ]  # fmt: skip
