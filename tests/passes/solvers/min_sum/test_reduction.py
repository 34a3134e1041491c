"""Eliminating nodes with at most two neighbours keeps the minimum cost, and choices can be
expanded.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.passes.solvers.min_sum import Edge, MinSum
from autopipe.passes.solvers.min_sum.elimination import eliminate, reduce_model
from autopipe.passes.solvers.min_sum.model import merge_edges


@given(models(), st.sampled_from([0, 5, 20, 1e9]))
def test_the_minimum_cost_is_unchanged(model: MinSum, work: float) -> None:
    choices = all_choices(model)
    if not choices:
        return
    reduction = reduce_model(merge_edges(model), work)
    assert reduction.work <= work
    answer = eliminate(reduction.model)
    least = min(choices)[0]
    expanded = reduction.expand_choice(answer.choice)
    assert model.cost_of(expanded) == pytest.approx(least, rel=1e-12, abs=1e-12)


def test_equal_layers_are_reduced_once() -> None:
    """Sixty-four equal two-way branches in a chain."""
    rng = np.random.default_rng(0)
    station = rng.random(6)
    branch = rng.random(9)
    enter = rng.random((6, 9))
    leave = rng.random((9, 6))
    edges: list[Edge] = []
    for first in range(0, 3 * 64, 3):
        for way in (first + 1, first + 2):
            edges += [Edge(first, way, enter), Edge(way, first + 3, leave)]
    model = MinSum((station, branch, branch) * 64 + (station,), tuple(edges))
    reduction = reduce_model(model, 1e9)
    assert len(reduction.model.costs) == 1
    assert reduction.work <= 6 * 9 * 6 + 20 * 6 * 6 * 6
    assert eliminate(reduction.model).cost == pytest.approx(eliminate(model).cost)
