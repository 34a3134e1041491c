"""Search within a memory limit, against all choices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import all_choices, models

from autopipe.passes.solvers.min_sum import Edge, MinSum, branch_and_bound, solve


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
def test_search_finds_the_minimum_within_the_limit(model: MinSum, share: float) -> None:
    check(model, share)


@given(models(memory=True), st.floats(0, 1), st.sampled_from([0, 100, 1000, 3000]))
def test_branching_finds_it_if_few_labels_are_allowed(
    model: MinSum, share: float, work: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_and_bound, "ALWAYS_ALLOWED_WORK", work)
        patch.setattr(branch_and_bound, "STALLED_WORK_FACTOR", 0)
        check(model, share)


def test_limited_work_returns_a_bound() -> None:
    rng = np.random.default_rng(0)
    pairs = [(u, v) for u in range(20) for v in range(u)]
    edges = tuple(Edge(u, v, rng.integers(0, 1000, (12, 12))) for u, v in pairs)
    vectors = tuple(rng.integers(0, 1000, 12) for _ in range(20))
    memory = tuple(rng.integers(0, 100, 12) for _ in range(20))
    answer = solve(MinSum(vectors, edges, memory), memory_limit=500, patience=0.1)
    assert answer.fits and answer.memory <= 500
    assert not answer.proven
    assert answer.bound < answer.cost
