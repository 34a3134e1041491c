"""Tests of partitions of random flows against exhaustive search."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.partition import min_cut_ilp as module
from autopipe.passes.partition.flow import Flow, PartitionSpace, downset_members, make_flow
from autopipe.passes.partition.min_cut_ilp import PartitionProblem, group_operators


@st.composite
def flows(draw: st.DrawFn, most: int = 7) -> Flow:
    """A few operators, some without work, and values with one reader or more."""
    count = draw(st.integers(3, most))
    work = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    values = []
    for source in range(count - 1):
        for _ in range(draw(st.integers(0, 2))):
            readers = draw(st.lists(st.integers(source + 1, count - 1), min_size=1, max_size=3))
            values.append((source, float(draw(st.integers(1, 5))), readers))
    return make_flow(np.array(work, dtype=float), values)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[PartitionSpace, float]:
    flow = draw(flows())
    stages = draw(st.integers(2, 3))
    first = np.zeros(flow.operators, dtype=np.int64)
    last = np.full(flow.operators, stages - 1)
    if draw(st.booleans()):
        first[-1] = last[-1] = stages - 1
        last[0] = 0
    unbalance = draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]))
    return PartitionSpace(flow, stages, first, last), unbalance


def every(space: PartitionSpace) -> list[np.ndarray]:
    """All divisions into stages that have work, in which no edge leads back."""
    flow = space.flow
    stages = space.stages
    _, sources, readers = flow.edges()
    ranges = [range(first, last + 1) for first, last in zip(space.first, space.last, strict=True)]
    tried = (np.array(each) for each in itertools.product(*ranges))
    return [
        s for s in tried if (s[sources] <= s[readers]).all() and (flow.loads(s, stages) > 0).all()
    ]


@pytest.mark.parametrize("most_downsets", [0, 6000])
@given(task=tasks())
@settings(max_examples=30)
def test_the_partition_is_optimal(task: tuple[PartitionSpace, float], most_downsets: int) -> None:
    space, unbalance = task
    flow = space.flow
    stages = space.stages
    found = every(space)
    limit = flow.work.sum() / stages * (1 + unbalance)
    allowed = [s for s in found if flow.loads(s, stages).max() <= limit + 1e-6]
    with mock.patch.object(module, "_MAXIMUM_DOWNSETS", most_downsets):
        check(PartitionProblem(space, unbalance, np.inf), found, allowed)


def check(search: PartitionProblem, found: list[np.ndarray], allowed: list[np.ndarray]) -> None:
    flow = search.flow
    stages = search.space.stages
    if not allowed:
        with pytest.raises(InfeasibleError) as refused:
            search.run()
        if found:
            smallest = (
                min(flow.loads(s, stages).max() for s in found) * stages / flow.work.sum() - 1
            )
            assert f"the minimum imbalance is {np.ceil(smallest * 1000 - 0.002) / 10:.1f}%" in str(
                refused.value
            )
        return
    answer = search.run()
    assert flow.crossing_bytes(answer.stage) == pytest.approx(
        min(map(flow.crossing_bytes, allowed))
    )
    assert any((answer.stage == each).all() for each in allowed)
    assert answer.bound == pytest.approx(flow.crossing_bytes(answer.stage))


@given(tasks())
@settings(max_examples=40)
def test_the_contiguous_partition_is_optimal(task: tuple[PartitionSpace, float]) -> None:
    space, unbalance = task
    flow = space.flow
    stages = space.stages
    limit = flow.work.sum() / stages * (1 + unbalance)
    lines = [s for s in every(space) if (np.diff(s) >= 0).all()]
    least = space.minimum_limit()
    assert least == pytest.approx(
        min((flow.loads(s, stages).max() for s in lines), default=np.inf), rel=1e-5
    )
    costs = [flow.crossing_bytes(s) for s in lines if flow.loads(s, stages).max() <= limit + 1e-6]
    line = space.best_contiguous(limit)
    if line is None:
        assert not costs
        return
    assert any((line == each).all() for each in lines)
    assert flow.crossing_bytes(line) == pytest.approx(min(costs))


@given(tasks())
@settings(max_examples=40)
def test_the_search_over_downsets_is_optimal(task: tuple[PartitionSpace, float]) -> None:
    space, unbalance = task
    flow = space.flow
    stages = space.stages
    limit = flow.work.sum() / stages * (1 + unbalance)
    allowed = [s for s in every(space) if flow.loads(s, stages).max() <= limit + 1e-6]
    members = downset_members(flow, 1000)
    assert members is not None
    _, sources, readers = flow.edges()
    tried = np.array(list(itertools.product([False, True], repeat=flow.operators)))
    assert len(members) == (tried[:, sources] >= tried[:, readers]).all(axis=1).sum()
    assert (members[:, sources] >= members[:, readers]).all()
    assert downset_members(flow, len(members) - 1) is None
    found = space.best_over_downsets(members, limit)
    if found is None:
        assert not allowed
        return
    assert any((found == each).all() for each in allowed)
    assert flow.crossing_bytes(found) == pytest.approx(min(map(flow.crossing_bytes, allowed)))


@given(flows(12), st.integers(1, 10))
@settings(max_examples=40)
def test_groups_have_no_cycles(flow: Flow, ceiling: int) -> None:
    space = PartitionSpace(
        flow, 4, np.zeros(flow.operators, dtype=np.int64), np.full(flow.operators, 3)
    )
    group = group_operators(space, 1.0, float(ceiling))
    _, sources, readers = flow.edges()
    assert (group[sources] <= group[readers]).all()
    assert set(group) == set(range(group.max() + 1))
    coarse = space.coarsened(group).flow
    assert coarse.work.sum() == flow.work.sum()
    heavy = flow.size[flow.edges()[0]] > ceiling
    assert (group[sources[heavy]] == group[readers[heavy]]).all()
    stage = np.minimum(np.arange(coarse.operators) * 3 // coarse.operators, 2)
    assert coarse.crossing_bytes(stage) == pytest.approx(flow.crossing_bytes(stage[group]))


def test_parallel_branches_send_less() -> None:
    """Two chains that meet at the end only: a contiguous order that interleaves them cuts both at
    each boundary.
    """
    values = [(index, 4.0, [index + 2]) for index in range(6)]
    values += [(6, 1.0, [8]), (7, 1.0, [8])]
    flow = make_flow(np.array([1.0] * 8 + [0.0]), values)
    space = PartitionSpace(flow, 2, np.zeros(9, dtype=np.int64), np.ones(9, dtype=np.int64))
    answer = PartitionProblem(space, 0.0, np.inf).run()
    assert answer.contiguous_bytes == 8
    assert flow.crossing_bytes(answer.stage) == 1
    assert answer.stage[:8].tolist() in ([0, 1] * 4, [1, 0] * 4)
