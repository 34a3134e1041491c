"""The default solver finds the minimum over all choices, with sweeps, elimination and branching."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum import (
    Assignment,
    Edge,
    MinSum,
    branch_and_bound,
    eliminate,
    solve,
)


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
def test_search_finds_the_minimum(model: MinSum) -> None:
    check(model, solve)


@given(models(), st.sampled_from([0, 10, 30, 100]))
def test_branching_finds_it_if_little_can_be_eliminated(model: MinSum, work: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_and_bound, "ALWAYS_ALLOWED_WORK", work)
        patch.setattr(branch_and_bound, "STALLED_WORK_FACTOR", 0)
        patch.setattr(branch_and_bound, "MAX_BYTES", 8 * work)
        check(model, solve)


def complete_graph(nodes: int, configurations: int) -> MinSum:
    """Return a model with an edge between all pairs of nodes, for which tables would be too
    large.
    """
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(nodes) for v in range(u)]
    edges = tuple(
        Edge(u, v, rng.integers(0, 1000, (configurations, configurations))) for u, v in pairs
    )
    return MinSum(tuple(rng.integers(0, 1000, configurations) for _ in range(nodes)), edges)


def test_limited_work_returns_a_bound() -> None:
    """Work is limited, not time: equal requests give equal results."""
    model = complete_graph(20, 12)
    small = complete_graph(6, 12)
    assert solve(small).cost == eliminate(small).cost
    answer = solve(model, patience=0.02)
    assert not answer.proven
    assert answer.bound < answer.cost == model.cost_of(answer.choice)
    assert answer.gap == (answer.cost - answer.bound) / answer.cost
    assert isinstance(answer.cost, int) and isinstance(answer.bound, int)
    assert solve(model, patience=0.02) == answer
    assert solve(model, time_limit=1e-9).choice
