"""Tests that the model's objective is the cost of the stage, and that no configuration of a small
model is better.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Split
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import SplitTables, make_split_tables
from autopipe.passes.solvers.min_sum import Assignment, solve
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem
from tests.passes.placement.pase.random_graphs import graphs, seconds_of, stage_of

CLUSTERS = (cluster(4), cluster(4, 2), cluster(6, 3), cluster(5))


OPTIMIZERS = [Optimizer("sgd"), Optimizer("adamw"), Optimizer("adamw", shard=True)]


def tables_of(given: Problem, **terms: object) -> SplitTables:
    devices = tuple(range(given.cluster.size))
    terms = {"given": frozenset(given.graph.outputs), **terms}
    return make_split_tables(given, range(len(given.graph.nodes)), devices, StageOptions(**terms))  # type: ignore[arg-type]


def uncounted(given: Problem, tables: SplitTables, answer: Assignment) -> float:
    """Seconds of a step that the model leaves out: latencies of the gradients' exchanges, and the
    update's launch.
    """
    cost = stage_of(given, tables.splits(answer.choice))
    counted = sum(
        float(each[number]) for each, number in zip(tables.gradients, answer.choice, strict=True)
    )
    return (
        cost.gradient_s - counted + given.cluster.devices[0].launch_latency_s * (cost.update_s > 0)
    )


def at_random(given: Problem, tables: SplitTables, seed: int) -> SplitTables:
    """The same with one configuration of each node alone."""
    draw = random.Random(seed)
    allowed = {
        node: (draw.choice(each),)
        for node, each in zip(tables.nodes, tables.configurations, strict=True)
    }
    return tables_of(given, allowed=allowed)


@settings(max_examples=20)
@given(
    graphs(branches=False),
    st.sampled_from(CLUSTERS),
    st.integers(0, 99),
    st.sampled_from(OPTIMIZERS),
)
def test_a_chain_costs_as_much_as_its_stage(
    graph: Graph, devices: Cluster, seed: int, optimizer: Optimizer
) -> None:
    given = problem(graph, devices, optimizer=optimizer)
    for tables in (tables_of(given), at_random(given, tables_of(given), seed)):
        answer = solve(tables.model)
        expected = seconds_of(given, tables.splits(answer.choice)) - uncounted(
            given, tables, answer
        )
        assert answer.cost == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20)
@given(graphs(), st.sampled_from(CLUSTERS), st.sampled_from([Mode.TRAIN, Mode.INFER]))
def test_with_branches_the_stage_costs_at_most_the_objective(
    graph: Graph, devices: Cluster, mode: Mode
) -> None:
    given = problem(graph, devices, mode=mode)
    tables = tables_of(given)
    answer = solve(tables.model)
    expected = seconds_of(given, tables.splits(answer.choice))
    if mode is Mode.TRAIN:
        expected -= uncounted(given, tables, answer)
    assert answer.cost >= expected * (1 - 1e-9)


@pytest.mark.parametrize("devices", [cluster(2), cluster(3), cluster(2, 1)])
def test_no_configuration_is_better(devices: Cluster) -> None:
    given = problem(perceptron([12, 24, 12], batch=12), devices)
    tables = tables_of(given)
    answer = solve(tables.model)
    found = seconds_of(given, tables.splits(answer.choice))
    every = itertools.product(*(range(len(each)) for each in tables.configurations[:3]))
    best = min(seconds_of(given, tables.splits((*each, answer.choice[3]))) for each in every)
    assert found <= best + uncounted(given, tables, answer)


def test_two_readers_share_one_gather() -> None:
    """x is sharded by its width, and two matmuls need it replicated: it is gathered once."""
    builder = Builder(8, 16)
    data = builder.relu("x")
    graph = builder.finish(builder.add(builder.linear(data, 16), builder.linear(data, 16)))
    given = problem(graph, cluster(4))
    allowed = {0: ((Split("x1", 4),),), 1: ((Split("n", 4),),), 2: ((Split("n", 4),),)}
    tables = tables_of(given, allowed=allowed)
    answer = solve(tables.model)
    expected = seconds_of(given, tables.splits(answer.choice)) - uncounted(given, tables, answer)
    assert answer.cost == pytest.approx(expected, rel=1e-9)


def test_a_shared_parameter_is_replicated_if_its_readers_differ() -> None:
    builder = Builder(8, 16)
    weight = builder.parameter("w", (16, 16))
    graph = builder.finish(builder.matmul(builder.relu(builder.matmul("x", weight)), weight))
    given = problem(graph, cluster(4))
    for second in ((Split("n", 4),), (Split("k", 4),)):
        tables = tables_of(given, allowed={0: ((Split("n", 4),),), 2: (second,)})
        answer = solve(tables.model)
        cost = stage_of(given, tables.splits(answer.choice))
        assert cost.parameter_bytes == 16 * 16 * 4 // (4 if second[0].axis == "n" else 1)
        expected = seconds_of(given, tables.splits(answer.choice)) - uncounted(
            given, tables, answer
        )
        assert answer.cost == pytest.approx(expected, rel=1e-9)


def test_equal_layers_share_their_arrays() -> None:
    tables = tables_of(problem(perceptron([12] * 9), cluster(4)))
    assert len({id(each) for each in tables.model.costs}) <= 4
    assert len({id(edge.costs) for edge in tables.model.edges}) <= 4


def test_a_node_that_reads_an_input_has_its_own_temporary_memory() -> None:
    """The gradient of an operand that a node computed counts, that of an input of the graph does
    not. Until the key of a class told them apart, both Relus had the memory of the first.
    """
    builder = Builder(6, 12)
    first = builder.relu("x")
    second = builder.relu(first)
    tables = tables_of(problem(builder.finish(builder.relu(second)), cluster(1)))
    size = 6 * 12 * 4
    assert [each.tolist() for each in tables.passing] == [[size], [2 * size], [2 * size]]
