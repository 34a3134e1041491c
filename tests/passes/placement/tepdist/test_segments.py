"""Tests of cones, segments and critical nodes in TePDist's search for splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from random_layers import best_choice, layered

from autopipe.passes.placement.tepdist.segments import (
    MAXIMUM_HIGH_DEGREE,
    SegmentCache,
    cone_roots,
    divide_into_segments,
    fill_cones,
    variable_ranks,
)
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import make_split_tables
from autopipe.passes.solvers.min_sum import Edge, MinSum, solve
from autopipe.passes.solvers.min_sum.model import (
    absorb_fixed_nodes,
    all_configurations,
    merge_edges,
    restrict,
)
from tests.passes.placement.pase.paper.models import model_graph, problem_of

MATRIX = np.array([[0.0, 3.0], [2.0, 0.0]])


def joined(count: int, *ends: tuple[int, int], heavy: tuple[int, ...] = ()) -> MinSum:
    """Return a model with two configurations per variable; the variables in `heavy` cost 100 times
    as much.
    """
    costs = [
        np.array([100.0, 101.0]) if variable in heavy else np.array([1.0, 1.0])
        for variable in range(count)
    ]
    return MinSum(tuple(costs), tuple(Edge(*each, MATRIX) for each in ends))


def test_roots_are_joins_branches_outputs_and_heavy_variables() -> None:
    #  0 -> 1 -> 2 -> 4 -> 5 -> 6, 2 -> 3 -> 5; 4 is heavy.
    model = joined(7, (0, 1), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5), (5, 6), heavy=(4,))
    assert np.flatnonzero(cone_roots(model)).tolist() == [2, 4, 5, 6]


@settings(max_examples=20)
@given(layered())
def test_filled_cones_preserve_the_minimum_cost(model: MinSum) -> None:
    cones = fill_cones(model)
    best = best_choice(model)
    assert best_choice(cones.model) == best
    if best < np.inf:
        found = cones.expand(solve(cones.model).choice)
        assert model.cost_of(found) == pytest.approx(best)


@settings(max_examples=15)
@given(layered(memory=True))
def test_filled_cones_report_the_cost_and_memory_of_the_expanded_choice(model: MinSum) -> None:
    cones = fill_cones(model, rate=3.0)
    for choice in np.ndindex(*(len(costs) for costs in cones.model.costs)):
        whole = cones.expand(choice)
        assert cones.model.cost_of(choice) == pytest.approx(model.cost_of(whole))
        if np.isfinite(model.cost_of(whole)):
            assert cones.model.memory_of(choice) == model.memory_of(whole)


def test_a_bypassed_node_is_not_critical() -> None:
    # 0 -> 1 -> 2 -> 3 -> 4 and 0 -> 2: node 1 does not separate the graph.
    model = joined(5, (0, 1), (1, 2), (0, 2), (2, 3), (3, 4), heavy=(1,))
    found = divide_into_segments(model, variable_ranks(model))
    assert found.critical == (0, 2, 3, 4)
    assert {(segment.ends, segment.inner) for segment in found.segments} == {
        ((0, 1), ()),
        ((0, 1), (1,)),
        ((1, 2), ()),
        ((2, 3), ()),
    }


def test_a_variable_read_by_all_layers_is_high_degree() -> None:
    layers = [(each, each + 1) for each in range(19)]
    model = joined(21, *layers, *((20, each) for each in range(1, 20)))
    found = divide_into_segments(model, variable_ranks(model))
    assert found.high_degree == (20,)
    assert found.critical == tuple(range(20))


def test_readers_of_high_degree_variables_are_not_selected_instead_of_them() -> None:
    layers = [(each, each + 1) for each in range(19)]
    tables = [(table, each) for table in (20, 21, 22, 23) for each in range(1, 20)]
    model = joined(24, *layers, *tables)
    found = divide_into_segments(model, variable_ranks(model))
    assert found.high_degree == (20, 21, 22, 23)
    assert found.critical == tuple(range(20))


@settings(max_examples=60)
@given(layered())
def test_no_edge_bypasses_a_critical_node(model: MinSum) -> None:
    simple = merge_edges(model)
    found = divide_into_segments(simple, variable_ranks(model))
    place = {variable: number for number, variable in enumerate(found.critical)}
    inside = {variable: segment for segment in found.segments for variable in segment.inner}
    assert sorted([*found.high_degree, *found.critical, *inside]) == list(range(len(model.costs)))
    assert len(found.high_degree) <= MAXIMUM_HIGH_DEGREE
    for edge in simple.edges:
        ends = {edge.source, edge.target} - set(found.high_degree)
        segments = {id(inside[variable]) for variable in ends if variable in inside}
        assert len(segments) <= 1
        places = {place[variable] for variable in ends if variable in place}
        assert max(places, default=0) - min(places, default=0) <= 1
        for variable in ends & inside.keys():
            assert places <= set(inside[variable].ends)


def test_equal_layers_are_solved_once() -> None:
    """The number of distinct segments is equal for GPT-3 125M (12 layers) and 1.3B (24 layers)."""
    different = []
    for size in ("125m", "1.3b"):
        graph = model_graph("gpt", 8, size)
        terms = StageOptions(given=frozenset({"loss"}))
        tables = make_split_tables(
            problem_of(graph, 4), range(len(graph.nodes)), tuple(range(4)), terms
        )
        cones = fill_cones(tables.model)
        parts = divide_into_segments(cones.model, variable_ranks(tables.model)[list(cones.roots)])
        kept = all_configurations(cones.model)
        for variable in parts.high_degree:
            kept[variable] = np.array([0])
        equal = SegmentCache()
        assert (
            len(equal.segment_tables(absorb_fixed_nodes(restrict(cones.model, kept)), parts)) > 30
        )
        different.append(len(equal.known))
    assert different[0] == different[1] < 15
