"""Tests of strategy pase: memory limits, stages, determinism, and steps never longer than data
parallelism's.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.stages import stage_costs, step_seconds
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.sharding.configurations import configurations
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem
from tests.passes.placement.pase.random_graphs import Splits, graphs, seconds_of, stage_of


def memory_of(given: Problem, placement: Placement) -> int:
    return max(device_memory(given, placement, stage_costs(given, placement)))


def least_bytes(given: Problem, splits: Splits) -> int:
    nodes = tuple(range(len(given.graph.nodes)))
    devices = tuple(range(given.cluster.size))
    return memory_of(given, Placement((Stage(nodes, devices, given.micro_batch_size, splits),)))


@settings(max_examples=15)
@given(graphs(), st.sampled_from([cluster(2), cluster(4, 2), cluster(6)]))
def test_never_below_data_parallelism(graph: Graph, devices: Cluster) -> None:
    given = problem(graph, devices)
    (stage,) = Pase().run(given).stages
    samples = sample_axes(graph)
    group = devices.size
    if all(samples.can_divide(node, group) for node in range(len(graph.nodes))):
        shared = samples.splits(range(len(graph.nodes)), group)
        assert seconds_of(given, stage.splits) <= seconds_of(given, shared)


def test_large_layers_are_split_by_columns_and_rows() -> None:
    """Few samples and large weights: gradients would cost more communication than activations."""
    given = problem(perceptron([512, 2048, 512], batch=8), cluster(4), micro_batches=1)
    (stage,) = Pase().run(given).stages
    assert stage.splits_of(0) == (Split("n", 4),)
    assert stage.splits_of(2) == (Split("k", 4),)


@pytest.mark.parametrize("ordering", ["generate_seq", "breadth_first", "min_fill"])
def test_elimination_finds_the_same(ordering: str) -> None:
    given = problem(perceptron([64, 256, 64, 256]), cluster(4, 2))
    (exact,) = Pase().run(given).stages
    (other,) = Pase(solver="elimination", ordering=ordering).run(given).stages  # type: ignore[arg-type]
    assert seconds_of(given, exact.splits) == pytest.approx(
        seconds_of(given, other.splits), rel=1e-12
    )


def test_splits_fit_into_memory_if_the_fastest_do_not() -> None:
    """With many samples, halves of the parameters are fastest; quarters need less memory."""
    free = problem(perceptron([1024, 1024, 1024], batch=1024), cluster(4), micro_batches=8)
    fastest = Pase().run(free)
    need = memory_of(free, fastest)
    tight = replace(free, memory_limit=int(need * 0.9))
    placement = Pase().run(tight)
    assert memory_of(tight, placement) <= int(need * 0.9)
    assert seconds_of(free, placement.stages[0].splits) > seconds_of(free, fastest.stages[0].splits)


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_no_choice_that_fits_is_better(share: float) -> None:
    given = problem(perceptron([64, 128, 64], batch=256), cluster(2), micro_batches=8)
    configured = [configurations(space_of(given.graph, node), 2) for node in given.graph.nodes]
    every = [tuple(enumerate(each)) for each in itertools.product(*configured)]
    tight = replace(
        given, memory_limit=int(share * max(least_bytes(given, each) for each in every))
    )
    fitting = [each for each in every if least_bytes(given, each) <= (tight.memory_limit or 0)]
    best = min(seconds_of(given, each) for each in fitting)
    (stage,) = Pase().run(tight).stages
    assert least_bytes(given, stage.splits) <= (tight.memory_limit or 0)
    assert seconds_of(given, stage.splits) <= best * 1.01, (
        "but for latencies that the model does not count"
    )


def test_the_minimum_excess_is_reported() -> None:
    given = problem(perceptron([256, 1024, 256]), cluster(4), memory_limit=1000)
    with pytest.raises(
        InfeasibleError,
        match=r"over the limit of 0.98 KiB, in the placement with the lowest memory requirement",
    ):
        Pase().run(given)


def test_elimination_reports_the_excess_of_memory() -> None:
    given = problem(perceptron([256, 1024, 256]), cluster(4), memory_limit=1000)
    with pytest.raises(InfeasibleError, match=r"over the limit of 0.98 KiB"):
        Pase(solver="elimination").run(given)


def test_stages_of_equal_groups_are_split_inside() -> None:
    given = problem(perceptron([512, 2048, 512, 2048, 512], batch=8), cluster(8, 4))
    first, second = Pase(stages=2).run(given).stages
    assert (first.devices, second.devices) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert set(first.nodes) | set(second.nodes) == set(range(8))
    assert first.splits and second.splits
    assert all(
        split.degree <= 4
        for stage in (first, second)
        for _, splits in stage.splits
        for split in splits
    )


def test_more_stages_than_operators() -> None:
    with pytest.raises(InfeasibleError, match="2 operators cannot be partitioned into 4 stages"):
        Pase(stages=4).run(problem(perceptron([8, 8]), cluster(4)))


def test_a_parameter_of_two_stages() -> None:
    builder = Builder(8, 64)
    weight = builder.parameter("w", (64, 64))
    data = builder.relu(builder.matmul("x", weight))
    given = problem(builder.finish(builder.matmul(data, weight)), cluster(4, 2))
    first, second = stage_costs(given, Pase(stages=2).run(given))
    assert first.parameter_bytes == second.parameter_bytes, "whole in both, or cut equally"


def test_a_short_time_limit_gives_a_placement() -> None:
    given = problem(perceptron([64, 256, 64, 256]), cluster(4, 2), time_limit=1e-9)
    Pase().run(given).verify(given.graph)


def test_equal_problems_have_equal_placements() -> None:
    given = problem(perceptron([64, 256, 64, 256]), cluster(6, 3))
    assert Pase().run(given) == Pase().run(given)


@pytest.mark.parametrize("batch", [8, 64, 256])
def test_gradients_that_backward_hides(batch: int) -> None:
    """No choice has a lower cost with overlapped gradients."""
    given = problem(perceptron([128, 256, 128], batch=batch), cluster(2), micro_batches=1)
    configured = [configurations(space_of(given.graph, node), 2) for node in given.graph.nodes]
    every = [tuple(enumerate(each)) for each in itertools.product(*configured)]
    best = min(
        step_seconds(stage_of(given, each), given.micro_batches, overlap=True) for each in every
    )
    placement = Pase(overlap=True).run(given)
    found = step_seconds(
        stage_of(given, placement.stages[0].splits), given.micro_batches, overlap=True
    )
    assert found == pytest.approx(best, rel=0.02), "but for latencies that the model does not count"
    assert placement.proof is not None
    assert placement.proof.lower_bound <= found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages is 0, but the cluster has 4 devices"),
        ({"stages": 5}, "stages is 5, but the cluster has 4 devices"),
        (
            {"costs": "pase-paper"},
            "costs pase-paper and search_space executable are incompatible",
        ),
        ({"search_space": "paper"}, "costs autopipe and search_space paper are incompatible"),
        (
            {"costs": "pase-paper", "search_space": "paper", "stages": 2},
            "supports neither constraints nor several stages",
        ),
    ],
)
def test_incompatible_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Pase(**options).requires(problem(perceptron([8, 8]), cluster(4)))  # type: ignore[arg-type]


def test_stages_that_do_not_divide_the_devices() -> None:
    with pytest.raises(
        ConfigurationError, match="4 devices cannot be divided evenly into 3 stages"
    ):
        Pase(stages=3).run(problem(perceptron([8, 8, 8, 8]), cluster(4)))
