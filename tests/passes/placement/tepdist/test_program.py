"""Tests that the integer program of a min-sum model has the optimum of exhaustive search, with
forbidden pairs and memory limits.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import best_choice, layered

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.integer_programs import (
    cheapest_choice,
    fix_by_reduced_cost,
    keep_promising,
)
from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.model import merge_edges


@settings(max_examples=10)
@given(model=layered(memory=True), limit=st.integers(10, 60))
def test_the_program_is_the_model(model: MinSum, limit: int) -> None:
    simple = merge_edges(model)
    best = best_choice(model, limit)
    if best == np.inf:
        with pytest.raises(InfeasibleError):
            cheapest_choice(simple, 60.0, limit=limit)
        return
    answer = cheapest_choice(simple, 60.0, limit=limit)
    assert answer.cost == pytest.approx(best, rel=1e-9)
    assert answer.memory <= limit
    assert answer.bound <= answer.cost


@settings(max_examples=15)
@given(layered())
def test_removed_configurations_are_in_no_better_choice(model: MinSum) -> None:
    simple = merge_edges(model)
    best = best_choice(model)
    if best == np.inf:
        return
    left = keep_promising(simple, fix_by_reduced_cost(simple), 4)
    assert left.bound <= best * (1 + 1e-9) <= left.cost * (1 + 2e-9)
    for variable, costs in enumerate(simple.costs):
        assert left.choice[variable] in left.kept[variable]
        for number in set(range(len(costs))) - set(left.kept[variable].tolist()):
            others = [each[:] for each in simple.costs]
            others[variable] = np.where(np.arange(len(costs)) == number, costs, np.inf)
            with_it = best_choice(MinSum(tuple(others), simple.edges))
            assert with_it >= min(left.cost, left.removed_bound) * (1 - 1e-9)
