"""Tests of levels O2, O3 and O4 against exhaustive and exact search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import best_choice, layered

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.passes.placement.tepdist.levels import O2, O3, O4, Level
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import SplitTables, make_split_tables
from autopipe.passes.solvers.min_sum import MinSum, solve
from tests.passes.cost.graphs import cluster, problem
from tests.passes.placement.pase.paper.models import model_graph, problem_of
from tests.passes.placement.pase.random_graphs import graphs

LEVELS = (O2, O3, O4)


def tables_of(model: MinSum) -> SplitTables:
    """Tables of a bare model; levels look at nothing else."""
    return SplitTables((), (), model, (), (), (), ())


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=20)
@given(layered())
def test_without_a_limit_no_choice_is_better(level: type[Level], model: MinSum) -> None:
    best = best_choice(model)
    if best == np.inf:
        with pytest.raises(InfeasibleError):
            level()(tables_of(model), None)
        return
    answer = level()(tables_of(model), None)
    assert answer.cost == pytest.approx(best, rel=1e-9)
    assert answer.cost == model.cost_of(answer.choice)
    assert answer.proven


@pytest.mark.parametrize("level", LEVELS)
def test_an_empty_model_has_an_empty_choice(level: type[Level]) -> None:
    answer = level()(tables_of(MinSum((), ())), 10)
    assert (answer.choice, answer.cost, answer.bound, answer.fits) == ((), 0.0, 0.0, True)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=12)
@given(layered(memory=True), st.integers(0, 60))
def test_within_a_limit_choices_fit_and_bounds_hold(
    level: type[Level], model: MinSum, limit: int
) -> None:
    if best_choice(model) == np.inf:
        return
    best = best_choice(model, limit)
    answer = level()(tables_of(model), limit)
    assert answer.fits == (best < np.inf)
    assert answer.cost == model.cost_of(answer.choice)
    assert answer.memory == model.memory_of(answer.choice)
    if answer.fits:
        assert answer.memory <= limit
        assert answer.bound <= best * (1 + 1e-6) <= answer.cost * (1 + 2e-6)
        assert not answer.proven or answer.cost == pytest.approx(best, rel=1e-6)
        if level is O4:
            assert answer.cost == pytest.approx(best, rel=1e-6)
    else:
        assert answer.memory == min_memory(model)


def min_memory(model: MinSum) -> float:
    """The least memory of a choice that is not forbidden."""
    return next(limit for limit in range(200) if best_choice(model, limit) < np.inf)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=4)
@given(graphs())
def test_small_graphs_are_split_as_the_exact_search_does(level: type[Level], graph: Graph) -> None:
    given = problem(graph, cluster(4, 2))
    tables = make_split_tables(
        given, range(len(graph.nodes)), (0, 1, 2, 3), StageOptions(given=frozenset(graph.outputs))
    )
    assert level()(tables, None).cost == pytest.approx(solve(tables.model).cost, rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", ["gpt", "unet", "moe"])
def test_networks_are_split_as_the_exact_search_does(level: type[Level], model: str) -> None:
    given = problem_of(model_graph(model, 8), 4)
    terms = StageOptions(given=frozenset(given.graph.outputs))
    tables = make_split_tables(given, range(len(given.graph.nodes)), tuple(range(4)), terms)
    answer = level()(tables, None)
    assert answer.cost == pytest.approx(solve(tables.model).cost, rel=1e-9)
    assert answer.gap <= 1e-9


@pytest.mark.parametrize("level", LEVELS)
def test_within_memory_a_network_is_split_close_to_the_bound(level: type[Level]) -> None:
    given = problem_of(model_graph("alexnet", 8), 4)
    tables = make_split_tables(
        given,
        range(len(given.graph.nodes)),
        tuple(range(4)),
        StageOptions(given=frozenset({"loss"})),
    )
    free = level()(tables, None)
    least = sum(int(each.min()) for each in tables.model.memory or ())
    limit = (free.memory + least) / 2
    answer = level()(tables, limit)
    assert answer.fits and answer.memory <= limit
    assert free.cost <= answer.bound <= answer.cost
    assert answer.cost <= solve(tables.model, limit).cost * 1.02


def test_an_infeasible_limit_gives_the_minimum_memory() -> None:
    model = MinSum((np.array([1.0, 5.0]),), (), (np.array([9, 7]),))
    for level in LEVELS:
        answer = level()(tables_of(model), 3)
        assert not answer.fits and answer.choice == (1,)
