"""The default solver finds what trying all choices finds, with each of its means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum import Assignment, Edge, MinSum, eliminate, solve
from autopipe.passes.solvers.min_sum import branch_and_bound as goal
from autopipe.passes.solvers.min_sum import branch_and_bound as search


def check(model: MinSum, solver: Callable[[MinSum], Assignment]) -> None:
    choices = all_choices(model)
    if not choices:
        with pytest.raises(InfeasibleError):
            solver(model)
        return
    answer = solver(model)
    assert answer.cost == pytest.approx(min(choices)[0], rel=1e-12, abs=1e-12)
    assert answer.cost == model.cost_of(answer.choice)
    assert answer.proven and answer.gap == 0 and answer.bound == answer.cost


@given(models())
def test_it_finds_the_least_of_all_choices(model: MinSum) -> None:
    check(model, solve)


@given(models(), st.sampled_from([0, 10, 30, 100]))
def test_cutting_in_two_finds_it_where_little_can_be_eliminated(model: MinSum, work: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SMALL", work)
        patch.setattr(search, "PATIENCE", 0)
        patch.setattr(goal, "MAX_BYTES", 8 * work)
        check(model, solve)


def everyone(nodes: int, configurations: int) -> MinSum:
    """Everyone with everyone: too many tables for elimination."""
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(nodes) for v in range(u)]
    edges = tuple(
        Edge(u, v, rng.integers(0, 1000, (configurations, configurations))) for u, v in pairs
    )
    return MinSum(tuple(rng.integers(0, 1000, configurations) for _ in range(nodes)), edges)


def test_a_limit_ends_the_search_with_a_bound() -> None:
    """A limit of work, which no clock looks at: the answer is the same each time."""
    model = everyone(20, 12)
    small = everyone(6, 12)
    assert solve(small).cost == eliminate(small).cost
    answer = solve(model, patience=0.02)
    assert not answer.proven
    assert answer.bound < answer.cost == model.cost_of(answer.choice)
    assert answer.gap == (answer.cost - answer.bound) / answer.cost
    assert isinstance(answer.cost, int) and isinstance(answer.bound, int)
    assert solve(model, patience=0.02) == answer
    assert solve(model, time_limit=1e-9).choice
