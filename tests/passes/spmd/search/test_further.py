"""Tests that splitting stages further changes their splits only, and makes no step longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Constraint, Mode, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.graphpipe.strategy import split_stages_by_pase
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.sharding.regions import check_constraints_met
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import cluster

PARTS = {
    "two-branch": (range(22), range(22, 49)),
    "mmt": (range(29), range(29, 58), range(58, 63)),
    "candle-uno": (range(8), range(8, 17), range(17, 21)),
}
SAMPLES = 12


def problem_of(model: str, cluster: Cluster, samples: int = SAMPLES) -> Problem:
    """Two micro-batches of the small model of the zoo."""
    graph, loss = small_graph(model, samples)
    return Problem(graph, roofline_costs(graph), cluster, 2 * samples, 2, Mode.TRAIN, loss)


def links(devices: int, bytes_a_second: float) -> Cluster:
    """Devices whose kernels start at once, joined by links without latency."""
    level = Level("node", devices, Link(0.0, bytes_a_second))
    return replace(cluster(devices, memory=10**12, latency=0.0), levels=(level,))


def by_samples(
    problem: Problem, model: str, degrees: tuple[int, ...], sizes: tuple[int, ...]
) -> Placement:
    """The model's parts on so many devices each, which share out the samples of micro-batches of so
    many.
    """
    samples = sample_axes(problem.graph)
    stages = []
    first = 0
    for nodes, degree, size in zip(PARTS[model], degrees, sizes, strict=True):
        devices = tuple(range(first, first + degree))
        stages.append(Stage(tuple(nodes), devices, size, samples.splits(nodes, degree)))
        first += degree
    return Placement(tuple(stages), notes=("kept",))


def step(problem: Problem, placement: Placement) -> float:
    """Seconds of a step by kFkB."""
    schedule = KForwardsKBackwards().run(problem, placement)
    return simulate(
        schedule, StageGraph.of(problem, placement).stage_devices, predict(problem, placement)
    ).end


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_only_splits_change_and_no_step_is_longer(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(sorted(PARTS)))
    count = len(PARTS[model])
    degrees = tuple(data.draw(st.sampled_from((1, 2, 4))) for _ in range(count))
    sizes = tuple(degree * data.draw(st.sampled_from((1, 2))) for degree in degrees)
    problem = problem_of(
        model, links(sum(degrees), data.draw(st.sampled_from((1e7, 1e9, 1e11)))), max(sizes)
    )
    before = by_samples(problem, model, degrees, sizes)
    after = split_stages_by_pase(problem, before)
    after.verify(problem.graph)
    assert after.notes == before.notes
    assert [replace(stage, splits=()) for stage in after.stages] == [
        replace(stage, splits=()) for stage in before.stages
    ]
    assert step(problem, after) <= step(problem, before)


@pytest.mark.parametrize("sizes", [(12, 12, 12), (6, 12, 4)])
def test_large_layers_are_split_by_rows_and_columns_on_slow_links(
    sizes: tuple[int, ...],
) -> None:
    problem = problem_of("candle-uno", links(6, 1e6))
    before = by_samples(problem, "candle-uno", (2, 2, 2), sizes)
    after = split_stages_by_pase(problem, before)
    assert step(problem, after) < step(problem, before)
    axes = sample_axes(problem.graph).axes
    assert any(
        split.axis != axes[node]
        for stage in after.stages
        for node, own in stage.splits
        for split in own
    )


def test_the_splits_fit_into_memory() -> None:
    """Splits by rows and columns need fewer gradients but save more unsplit tensors; the limit
    excludes the fastest splits.
    """
    problem = problem_of("mmt", links(6, 1e6))
    before = by_samples(problem, "mmt", (2, 2, 2), (12, 12, 12))
    limit = max(device_memory(problem, before, stage_costs(problem, before)))
    tight = replace(problem, memory_limit=limit)
    after = split_stages_by_pase(tight, before)
    assert max(device_memory(tight, after, stage_costs(tight, after))) <= limit


def test_stages_of_one_device_are_unchanged() -> None:
    problem = problem_of("two-branch", links(2, 1e9))
    before = by_samples(problem, "two-branch", (1, 1), (12, 6))
    assert split_stages_by_pase(problem, before) == before


def test_splits_that_constraints_require() -> None:
    problem = problem_of("candle-uno", links(6, 1e12))
    node = problem.graph.nodes[10]
    problem = replace(problem, constraints=(Constraint(node.name, split=(("n", 2),)),))
    before = by_samples(problem, "candle-uno", (2, 2, 2), (12, 12, 12))
    after = split_stages_by_pase(problem, before)
    assert after.stages[1].splits_of(10) == (Split("n", 2),)
    check_constraints_met(problem, after, "any")
    with pytest.raises(ConfigurationError, match="requires split n:2"):
        check_constraints_met(problem, before, "any")
