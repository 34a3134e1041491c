"""Memory limits: what trying all choices finds, or the least memory there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.passes.solvers.min_sum import Edge, MinSum, solve
from autopipe.passes.solvers.min_sum import branch_and_bound as search


def check(model: MinSum, share: float) -> None:
    choices = all_choices(model)
    if not choices:
        return
    least, most = (f(memory for _, memory in choices) for f in (min, max))
    limit = round(least - 1 + share * (most - least + 1))
    answer = solve(model, memory_limit=limit)
    assert (answer.cost, answer.memory) == (
        model.cost_of(answer.choice),
        model.memory_of(answer.choice),
    )
    assert answer.proven and answer.gap == 0
    fitting = [cost for cost, memory in choices if memory <= limit]
    assert answer.fits == bool(fitting)
    if fitting:
        assert answer.memory <= limit
        assert answer.cost == pytest.approx(min(fitting), rel=1e-12, abs=1e-12)
    else:
        assert answer.memory == least


@given(models(memory=True), st.floats(0, 1))
def test_it_finds_the_least_of_all_choices_that_fit(model: MinSum, share: float) -> None:
    check(model, share)


@given(models(memory=True), st.floats(0, 1), st.sampled_from([0, 100, 1000, 3000]))
def test_cutting_in_two_finds_it_where_few_labels_may_be_formed(
    model: MinSum, share: float, work: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SMALL", work)
        patch.setattr(search, "PATIENCE", 0)
        check(model, share)


def test_a_limit_of_work_ends_the_search_with_a_bound() -> None:
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(20) for v in range(u)]
    edges = tuple(Edge(u, v, rng.integers(0, 1000, (12, 12))) for u, v in pairs)
    vectors = tuple(rng.integers(0, 1000, 12) for _ in range(20))
    memory = tuple(rng.integers(0, 100, 12) for _ in range(20))
    answer = solve(MinSum(vectors, edges, memory), memory_limit=500, patience=0.1)
    assert answer.fits and answer.memory <= 500
    assert not answer.proven
    assert answer.bound < answer.cost
