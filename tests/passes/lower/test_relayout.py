"""Changes of layout against a simulation of their steps on numpy blocks: every position gets its block."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.layout import Box, Layout, MeshAxes, MeshAxis, merged
from autopipe.ir.redistribution import moves_between
from autopipe.ir.relayout import Relayout
from autopipe.ir.volume import lacking
from autopipe.passes.lower.relayout import reductions, steps_between

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
    found, stride = [], group
    while stride > 1:
        degree = draw(st.sampled_from([each for each in range(2, stride + 1) if stride % each == 0]))
        stride //= degree
        found.append(MeshAxis(degree, stride))
    return found


def layout(draw: st.DrawFn, shape: tuple[int, ...], group: int, partial: bool) -> Layout:
    """Each axis of a random mesh cuts a dimension, in any order, or holds copies, or shares."""
    places = [*range(len(shape)), "copies", *(["sums", "means"] if partial else [])]
    axes: dict[object, list[MeshAxis]] = {place: [] for place in places}
    for axis in draw(st.permutations(mesh(draw, group))):
        axes[draw(st.sampled_from(places))].append(axis)
    cuts = tuple(merged(axes[dimension]) for dimension in range(len(shape)))
    sums, means = (merged(sorted(axes.get(kind, []), key=lambda axis: -axis.stride)) for kind in ("sums", "means"))
    return Layout(shape, cuts, sums, means)


@st.composite
def pairs(draw: st.DrawFn, partial: bool = False) -> Pair:
    group = draw(GROUPS)
    shape = (group,) * draw(st.integers(1, 3))
    return Pair(group, layout(draw, shape, group, partial), layout(draw, shape, group, False))


def part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(map(slice, box.starts, box.stops))]


def whole(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)


def together(axes: MeshAxes, position: int, group: int) -> list[int]:
    """Positions that differ from one along `axes` alone, in the order of their places."""
    strides = {axis.stride for axis in axes}

    def elsewhere(each: int) -> int:
        return each - sum(axis.place(each) * axis.stride for axis in axes)

    assert len(strides) == len(axes)
    found = [each for each in range(group) if elsewhere(each) == elsewhere(position)]
    return sorted(found, key=lambda each: [axis.place(each) for axis in axes])


def applied(step: Relayout, held: Blocks, received: Counter[int]) -> Blocks:
    """What each position holds after one step; adds what it receives, in elements."""
    if step.kind == "redistribute":
        return redistributed(step, held, received)
    found = []
    for position in range(len(held)):
        members = together(step.over, position, len(held))
        place, size = members.index(position), len(members)
        blocks = [held[each] for each in members]
        if step.kind == "slice":
            result = np.split(held[position], size, step.dimension)[place]
        elif step.kind == "all_gather":
            result = np.concatenate(blocks, step.dimension)
            received[position] += result.size - held[position].size
        elif step.kind == "all_to_all":
            result = np.concatenate([np.split(each, size, step.dimension)[place] for each in blocks], step.origin)
            received[position] += result.size - result.size // size
        else:
            total = np.sum(blocks, axis=0) / step.divisor
            assert step.kind in ("all_reduce", "reduce_scatter")
            result = total if step.kind == "all_reduce" else np.split(total, size, step.dimension)[place]
        found.append(result)
    return found


def redistributed(step: Relayout, held: Blocks, received: Counter[int]) -> Blocks:
    group = len(held)
    found = [np.full(step.result.box(position).shape, np.nan) for position in range(group)]
    for move in moves_between(step.source, step.result, group):
        block = part(held[move.source], move.box.within(step.source.box(move.source)))
        place = part(found[move.target], move.box.within(step.result.box(move.target)))
        assert np.isnan(place).all(), "each element once"
        place[...] = block
        received[move.target] += block.size * (move.source != move.target)
    return found


def assert_held(held: Blocks, layout: Layout, value: np.ndarray) -> None:
    for position, block in enumerate(held):
        np.testing.assert_allclose(block, part(value, layout.box(position)), rtol=1e-12)


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_steps_lead_to_the_target_and_move_what_is_lacking(pair: Pair) -> None:
    value = whole(pair.source.shape)
    held = [part(value, pair.source.box(position)) for position in range(pair.group)]
    received: Counter[int] = Counter()
    form = pair.source
    for step in steps_between(pair.source, pair.target):
        assert step.source == form
        held = applied(step, held, received)
        form = step.result
        assert_held(held, form, value)
    assert form == pair.target
    assert [received[position] for position in range(pair.group)] == list(lacking(pair.source, pair.target, pair.group))


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
        held.append(part(value, pair.source.box(position)) * share)
    form = pair.source
    for step in reductions(pair.source, pair.target):
        assert step.source == form
        held = applied(step, held, Counter())
        form = step.result
    assert not form.is_partial
    assert_held(held, form, value)
    for now, found, wanted in zip(pair.source.cuts, form.cuts, pair.target.cuts, strict=True):
        assert found == now or _begins(Layout((1,), (wanted,)), Layout((1,), (found,)), pair.group)


def _begins(fine: Layout, coarse: Layout, group: int) -> bool:
    """Whether devices in one block of `fine` are in one block of `coarse`: it only goes on cutting."""
    boxes: dict[int, set[int]] = {}
    for position in range(group):
        index = [0, 0]
        for which, layout in enumerate((fine, coarse)):
            for axis in layout.cuts[0]:
                index[which] = index[which] * axis.degree + axis.place(position)
        boxes.setdefault(index[0], set()).add(index[1])
    return all(len(found) == 1 for found in boxes.values())


@given(pairs())
@settings(max_examples=200, deadline=None)
def test_each_box_is_sent_once_by_one_that_has_it_and_never_to_one_that_does(pair: Pair) -> None:
    times = [np.zeros(pair.source.shape, int) for _ in range(pair.group)]
    for move in moves_between(pair.source, pair.target, pair.group):
        own = pair.source.box(move.source).intersect(move.box)
        assert own == move.box, "the sender has it"
        if move.source != move.target:
            assert pair.source.box(move.target).intersect(move.box) is None, "the receiver lacks it"
        part(times[move.target], move.box)[...] += 1
    for position, found in enumerate(times):
        assert found.sum() == pair.target.box(position).elements
        assert (part(found, pair.target.box(position)) == 1).all()


def test_what_a_transposed_cut_takes_is_one_exchange() -> None:
    shape = (4, 4)
    rows, columns = (Layout(shape, cuts) for cuts in (((MeshAxis(4, 1),), ()), ((), (MeshAxis(4, 1),))))
    assert [step.kind for step in steps_between(rows, columns)] == ["all_to_all"]
    assert [step.kind for step in steps_between(rows, Layout(shape, ((), ())))] == ["all_gather"]
    assert [step.kind for step in steps_between(Layout(shape, ((), ())), rows)] == ["slice"]
    turned = Layout(shape, ((MeshAxis(2, 1), MeshAxis(2, 2)), ()))
    assert [step.kind for step in steps_between(rows, turned)] == ["redistribute"]


def test_places_of_a_mesh_name_each_device_once() -> None:
    axes = (MeshAxis(2, 6), MeshAxis(3, 1))
    assert list(itertools.chain(*[together(axes, start, 12) for start in (0, 3)])) == [
        0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11,
    ]  # fmt: skip
