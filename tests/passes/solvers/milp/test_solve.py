"""Integer programs against trying everything, and what is made of a solver that says what is not
so.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import AutopipeError
from autopipe.passes.solvers.milp import Builder, MilpResult, Model, Status, solve

# `autopipe.passes.solvers.milp` names the function.
door = sys.modules[solve.__module__]


def knapsack(most: float = 9.0) -> Model:
    """The most of 3a + 5b under 2a + 4b <= most and a, b <= 10."""
    builder = Builder()
    builder.add_variables(2, cost=[-3, -5], upper=10)
    builder.add_rows([0, 0], [0, 1], [2, 4], upper=most)
    return builder.model()


@st.composite
def programs(draw: st.DrawFn) -> Model:
    """A few whole numbers from -1 to 2 under a few rows, some of them equations or between two
    bounds.
    """
    figures = st.integers(-4, 4)
    count = draw(st.integers(1, 5))
    builder = Builder()
    lower = np.array(draw(st.lists(st.integers(-1, 0), min_size=count, max_size=count)))
    costs = draw(st.lists(figures, min_size=count, max_size=count))
    builder.add_variables(count, costs, lower, lower + draw(st.integers(0, 2)))
    for _ in range(draw(st.integers(0, 4))):
        columns = draw(st.lists(st.integers(0, count - 1), max_size=4))
        values = draw(st.lists(figures, min_size=len(columns), max_size=len(columns)))
        side = draw(figures)
        bounds = draw(
            st.sampled_from([(-np.inf, side), (side, np.inf), (side, side), (side - 1, side + 1)])
        )
        builder.add_rows([0] * len(columns), columns, values, *bounds, count=1)
    return builder.model()


def least_by_trying(model: Model) -> float:
    ranges = [
        range(int(low), int(high) + 1) for low, high in zip(model.lower, model.upper, strict=True)
    ]
    tried = (np.array(each, dtype=float) for each in itertools.product(*ranges))
    return min((model.objective(x) for x in tried if not model.violation(x)), default=np.inf)


@settings(max_examples=30)
@given(model=programs())
def test_the_answer_is_the_least_of_all(model: Model) -> None:
    least = least_by_trying(model)
    answer = solve(model, 60.0)
    if np.isinf(least):
        assert answer.status is Status.INFEASIBLE
        return
    assert answer.proven
    assert not model.violation(answer.values)
    assert answer.objective == pytest.approx(least)
    assert answer.bound <= answer.objective


def test_an_optimum_is_told_as_one() -> None:
    answer = solve(knapsack(), 60.0)
    assert (answer.status, answer.values.tolist(), answer.objective) == (
        Status.OPTIMAL,
        [4, 0],
        -12,
    )
    assert (answer.bound, answer.gap) == (-12, 0)


def test_costs_of_any_size_are_told_apart() -> None:
    model = knapsack()
    for scale in (1e-12, 1e12):
        answer = solve(replace(model, cost=model.cost * scale), 60.0)
        assert answer.proven
        assert answer.values.tolist() == [4, 0]


def test_no_values_are_told_as_proven() -> None:
    answer = solve(knapsack(-1.0), 60.0)
    assert (answer.status, answer.found, len(answer.values)) == (Status.INFEASIBLE, False, 0)


def test_costs_without_a_least_are_refused() -> None:
    builder = Builder()
    builder.add_variables(2, cost=-1, upper=np.inf)
    builder.add_rows([0, 0], [0, 1], [1, -1], upper=3)
    with pytest.raises(AutopipeError, match="no minimum"):
        solve(builder.model(), 60.0)


def test_a_linear_program_needs_no_whole_numbers() -> None:
    answer = solve(
        replace(knapsack(), integral=np.zeros(2, dtype=bool), upper=np.array([3.0, 10.0])), 60.0
    )
    assert answer.proven
    assert answer.values == pytest.approx([3, 0.75])


def test_a_program_of_nothing() -> None:
    assert solve(Builder().model(), 60.0).proven
    builder = Builder()
    builder.add_rows([], [], lower=1, count=1)
    assert solve(builder.model(), 60.0).status is Status.INFEASIBLE


def hard(seed: int = 0, count: int = 60) -> Model:
    """Market splits (Cornuéjols and Dawande, 1998): next to impossible for branch and bound beyond
    30 variables.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 100, (4, count))
    builder = Builder()
    chosen = builder.add_variables(count)
    over, under = (builder.add_variables(4, 1, upper=np.inf, integral=False) for _ in range(2))
    row = np.repeat(np.arange(4), count)
    rows = np.concatenate((row, np.arange(4), np.arange(4)))
    columns = np.concatenate((np.tile(chosen, 4), over, under))
    values = np.concatenate((sizes.ravel(), -np.ones(4), np.ones(4)))
    half = sizes.sum(axis=1) // 2
    builder.add_rows(rows, columns, values, half, half)
    return builder.model()


def test_the_end_of_time_leaves_the_best_found() -> None:
    answer = solve(hard(), 1.0)
    assert answer.status is Status.FEASIBLE
    assert answer.bound <= answer.objective
    assert answer.gap > 0
    assert not hard().violation(answer.values)


def test_an_answer_is_never_worse_than_its_start() -> None:
    model = hard(1)
    start = solve(model, 1.0).values
    answer = solve(model, 0.3, start=start, nodes=0)
    assert answer.found
    assert answer.objective <= model.objective(start)


def test_no_time_leaves_the_start_or_nothing() -> None:
    model = knapsack()
    nothing = solve(model, 0.0)
    assert nothing.status is Status.UNKNOWN
    answer = solve(model, 0.0, start=np.array([1.0, 1.0]))
    assert (answer.status, answer.objective) == (Status.FEASIBLE, -8)
    assert answer.gap == np.inf


def test_a_start_that_does_not_hold_is_refused() -> None:
    with pytest.raises(AutopipeError, match="row 0 is missed by 5"):
        solve(knapsack(), 1.0, start=np.array([1.0, 3.0]))


@pytest.mark.parametrize(
    "lie",
    [np.array([5.0, 0.0]), np.array([4.5, 0.0]), np.array([11.0, 0.0]), np.array([np.nan, 0.0])],
)
def test_a_solver_that_lies_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, lie: np.ndarray
) -> None:
    monkeypatch.setattr(
        door, "solve_with_highs", lambda *_: MilpResult(Status.FEASIBLE, lie, bound=-99.0)
    )
    assert solve(knapsack(), 1.0).status is Status.UNKNOWN
    begun = solve(knapsack(), 1.0, start=np.array([0.0, 1.0]))
    assert (begun.status, begun.values.tolist(), begun.bound) == (Status.FEASIBLE, [0, 1], -np.inf)


def test_a_run_without_presolve_answers_for_one_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = door.solve_with_highs

    def lying(
        model: Model, seconds: float, gap: float, nodes: int | None, presolve: bool
    ) -> MilpResult | None:
        if presolve:
            return MilpResult(Status.FEASIBLE, np.array([5.0, 0.0]), bound=-15.0 * 2**11)
        return honest(model, seconds, gap, nodes, presolve)

    monkeypatch.setattr(door, "solve_with_highs", lying)
    answer = solve(knapsack(), 60.0)
    assert (answer.proven, answer.values.tolist()) == (True, [4, 0])


def test_nothing_is_impossible_that_is_already_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "solve_with_highs", lambda *_: MilpResult(Status.INFEASIBLE))
    answer = solve(knapsack(), 1.0, start=np.array([0.0, 1.0]))
    assert (answer.status, answer.values.tolist()) == (Status.FEASIBLE, [0, 1])


def test_a_bound_below_the_values_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(model: Model, *_: object) -> MilpResult:
        bound = model.objective(np.array([4.0, 0.0]))
        return MilpResult(Status.FEASIBLE, np.array([2.0, 1.0]), bound=bound)

    monkeypatch.setattr(door, "solve_with_highs", claim)
    answer = solve(knapsack(), 1.0)
    assert (answer.status, answer.objective, answer.bound) == (Status.FEASIBLE, -11, -12)
    assert answer.gap == pytest.approx(1 / 11)
    assert solve(knapsack(), 1.0, gap=0.1).proven
