"""Tests that resharding tables contain the costs of the individual layout changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.layout import (
    Layout,
    MeshAxis,
    WindowedShards,
    merge_axes,
    mesh_axes_of,
    replicated_layout,
)
from autopipe.ir.placement import Split
from autopipe.passes.analysis.resharding import redistribution_steps, reduction_steps
from autopipe.passes.cost.communication import redistribution_seconds, transfer_seconds
from autopipe.passes.sharding.reshard_tables import ReshardTable
from tests.passes.cost.graphs import cluster

CLUSTERS = (cluster(4), cluster(8, 4), cluster(6, 2), cluster(12, 6), cluster(7))


@st.composite
def layouts(draw: st.DrawFn, group: int, shape: tuple[int, ...], partial: bool) -> Layout:
    """Mesh axes of a random factoring, each cutting a dimension, or shares of a sum, or nothing."""
    splits = []
    left = group
    for _ in range(draw(st.integers(0, 3))):
        degree = draw(st.sampled_from([each for each in range(1, left + 1) if left % each == 0]))
        splits.append(Split("a", degree))
        left //= degree
    cuts: list[list[MeshAxis]] = [[] for _ in shape]
    sums = []
    for axis in mesh_axes_of(splits, group):
        place = draw(st.integers(-1, len(shape) - 1 + partial))
        if place == len(shape):
            sums.append(axis)
        elif place >= 0:
            cuts[place].append(axis)
    return Layout(shape, tuple(map(merge_axes, cuts)), merge_axes(sums))


def seconds_by_steps(devices: Cluster, source: Layout, target: Layout) -> float:
    """What lowering's steps cost, one after the other."""
    steps = list(reduction_steps(source, target.with_even_shards())) if source.is_partial else []
    held = steps[-1].result if steps else source
    steps += redistribution_steps(held, target)
    everyone = tuple(range(devices.size))
    return sum(redistribution_seconds(devices, everyone, step, 4) for step in steps)


@settings(max_examples=30)
@given(st.data())
def test_a_table_contains_the_cost_of_each_change(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from(CLUSTERS))
    shape = (devices.size * 4, devices.size * 2)
    sources = data.draw(
        st.lists(layouts(devices.size, shape, True), min_size=1, max_size=6, unique=True)
    )
    targets = data.draw(
        st.lists(layouts(devices.size, shape, False), min_size=1, max_size=6, unique=True)
    )
    everyone = tuple(range(devices.size))
    found = ReshardTable(devices, everyone).to_reader(sources, targets, 4 * shape[0] * shape[1])
    wanted = [
        [seconds_by_steps(devices, source, target) for target in targets] for source in sources
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-15)


@settings(max_examples=30)
@given(st.data())
def test_one_step_costs_the_missing_volume(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from(CLUSTERS))
    everyone = tuple(range(devices.size))
    shape = (devices.size * 4, devices.size * 2)
    source, target = (data.draw(layouts(devices.size, shape, False)) for _ in range(2))
    if len(redistribution_steps(source, target)) > 1:
        return
    found = ReshardTable(devices, everyone).seconds([source], [target], 4 * shape[0] * shape[1])[
        0, 0
    ]
    assert found == pytest.approx(transfer_seconds(devices, everyone, source, target, 4), rel=1e-9)


def test_windowed_shards() -> None:
    devices = cluster(4, 2)
    held = [
        replicated_layout((8, 6)),
        Layout((8, 6), ((MeshAxis(4, 1),), ())),
        Layout((8, 6), ((), (MeshAxis(2, 1),))),
    ]
    windows = ((WindowedShards(2, -1, 4), None), (WindowedShards(2, 0, 2), None))
    wanted = [Layout((8, 6), ((MeshAxis(4, 1),), ()), windows=each) for each in windows]
    wanted.append(
        Layout(
            (8, 6), ((MeshAxis(2, 2),), (MeshAxis(2, 1),)), windows=(WindowedShards(4, -1, 6), None)
        )
    )
    found = ReshardTable(devices, (0, 1, 2, 3)).seconds(held, wanted, 8 * 6 * 4)
    by_steps = [[seconds_by_steps(devices, source, target) for target in wanted] for source in held]
    np.testing.assert_allclose(found, by_steps, rtol=1e-9, atol=1e-15)
    assert found[1, 0] > 0 == found[0, 0]
