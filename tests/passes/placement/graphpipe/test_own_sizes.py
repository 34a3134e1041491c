"""Micro-batches of stages' own sizes shorten a step, keep to what the problem allows, and fit into
memory.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.placement.graphpipe.strategy import search_stage_micro_batches
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from autopipe.passes.schedule.simulate import simulate
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import device

SIZES = (1, 2, 4, 8)
PARTS = range(4), range(4, 8), range(8, 12), range(12, 22)
"""Of the small DLRM: branches with dense features, then with sparse ones, then all else."""


def problem_of(latency: float, rate: float) -> Problem:
    """The small DLRM on a batch of 16 samples, on five devices."""
    graph, loss = small_graph("dlrm", SIZES[-1])
    toy = Cluster(
        "toy",
        (device(memory=10**9, latency=latency),) * 5,
        (Level("node", 5, Link(latency, rate)),),
    )
    return Problem(
        graph, roofline_costs(graph), toy, 16, 2, Mode.TRAIN, loss, micro_batch_sizes=SIZES
    )


def placement_of(problem: Problem, size: int) -> Placement:
    """A stage for each part, the last on two devices."""
    samples = sample_axes(problem.graph)
    groups = ((0,), (1,), (2,), (3, 4))
    parts = zip(PARTS, groups, strict=True)
    stages = (
        Stage(tuple(nodes), own, size, samples.splits(nodes, len(own))) for nodes, own in parts
    )
    return Placement(tuple(stages), notes=("kept",))


def step_of(problem: Problem, placement: Placement) -> Timeline:
    """A step by kFkB."""
    problem = with_micro_batch_size(
        problem, max(stage.micro_batch_size for stage in placement.stages)
    )
    schedule = KForwardsKBackwards().run(problem, placement)
    return simulate(
        schedule, StageGraph.of(problem, placement).stage_devices, predict(problem, placement)
    )


@settings(max_examples=5, deadline=None)
@given(st.sampled_from((0.0, 1e-7, 1e-5)), st.sampled_from((1e6, 1e9)), st.sampled_from((2, 4, 8)))
def test_no_step_is_longer_and_sizes_divide_the_largest(
    latency: float, rate: float, size: int
) -> None:
    problem = problem_of(latency, rate)
    before = placement_of(problem, size)
    after = search_stage_micro_batches(problem, before)
    assert after.notes == before.notes
    sizes = [stage.micro_batch_size for stage in after.stages]
    assert set(sizes) <= set(SIZES)
    assert all(max(sizes) % each == 0 for each in sizes)
    assert all(
        each % len(stage.devices) == 0 for each, stage in zip(sizes, after.stages, strict=True)
    )
    assert (
        replace(
            after, stages=tuple(replace(stage, micro_batch_size=size) for stage in after.stages)
        )
        == before
    )
    assert step_of(problem, after).end <= step_of(problem, before).end


@pytest.mark.parametrize(
    ("latency", "rate"),
    [
        (1e-5, 1e9),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in ((0.0, 1e6), (0.0, 1e12))),
    ],
)
def test_of_all_sizes_none_is_much_better(latency: float, rate: float) -> None:
    """Neither where starts of operators take longest, nor where messages do, nor where work
    does.
    """
    problem = replace(problem_of(latency, rate), micro_batch_sizes=SIZES[1:])
    before = placement_of(problem, 2)
    found = step_of(problem, search_stage_micro_batches(problem, before)).end
    every = []
    for sizes in itertools.product(SIZES[1:], repeat=len(PARTS)):
        pairs = zip(before.stages, sizes, strict=True)
        stages = tuple(replace(stage, micro_batch_size=size) for stage, size in pairs)
        every.append(step_of(problem, replace(before, stages=stages)).end)
    assert found <= 1.05 * min(every)
    assert found < step_of(problem, before).end


def test_memory_is_kept() -> None:
    problem = problem_of(1e-5, 1e9)
    before = placement_of(problem, 2)
    limit = max(step_of(problem, before).peak_memory)
    free = search_stage_micro_batches(problem, before)
    assert max(step_of(problem, free).peak_memory) > limit
    tight = replace(problem, memory_limit=limit)
    after = search_stage_micro_batches(tight, before)
    assert max(step_of(tight, after).peak_memory) <= limit
