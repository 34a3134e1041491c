"""Integer programs against brute force, and solvers with wrong results."""

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

# The module: an attribute of a package may have the same name.
milp_module = sys.modules[solve.__module__]


def knapsack(capacity: float = 9.0) -> Model:
    """Return the program: maximise 3a + 5b subject to 2a + 4b <= `capacity` and a, b <= 10."""
    builder = Builder()
    builder.add_variables(2, cost=[-3, -5], upper=10)
    builder.add_rows([0, 0], [0, 1], [2, 4], upper=capacity)
    return builder.model()


@st.composite
def programs(draw: st.DrawFn) -> Model:
    """Draw a program of a few integers from -1 to 2 with a few rows, some of them equations or with
    two bounds.
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


def minimum_by_brute_force(model: Model) -> float:
    ranges = [
        range(int(low), int(high) + 1) for low, high in zip(model.lower, model.upper, strict=True)
    ]
    tried = (np.array(each, dtype=float) for each in itertools.product(*ranges))
    return min((model.objective(x) for x in tried if not model.violation(x)), default=np.inf)


@settings(max_examples=30)
@given(model=programs())
def test_the_result_is_the_minimum(model: Model) -> None:
    least = minimum_by_brute_force(model)
    answer = solve(model, 60.0)
    if np.isinf(least):
        assert answer.status is Status.INFEASIBLE
        return
    assert answer.proven
    assert not model.violation(answer.values)
    assert answer.objective == pytest.approx(least)
    assert answer.bound <= answer.objective


def test_an_optimum_has_status_optimal() -> None:
    answer = solve(knapsack(), 60.0)
    assert (answer.status, answer.values.tolist(), answer.objective) == (
        Status.OPTIMAL,
        [4, 0],
        -12,
    )
    assert (answer.bound, answer.gap) == (-12, 0)


def test_costs_of_any_scale_are_distinguished() -> None:
    model = knapsack()
    for scale in (1e-12, 1e12):
        answer = solve(replace(model, cost=model.cost * scale), 60.0)
        assert answer.proven
        assert answer.values.tolist() == [4, 0]


def test_an_infeasible_program_has_status_infeasible() -> None:
    answer = solve(knapsack(-1.0), 60.0)
    assert (answer.status, answer.found, len(answer.values)) == (Status.INFEASIBLE, False, 0)


def test_an_objective_without_a_minimum_is_rejected() -> None:
    builder = Builder()
    builder.add_variables(2, cost=-1, upper=np.inf)
    builder.add_rows([0, 0], [0, 1], [1, -1], upper=3)
    with pytest.raises(AutopipeError, match="no minimum"):
        solve(builder.model(), 60.0)


def test_a_linear_program_may_have_fractions() -> None:
    answer = solve(
        replace(knapsack(), integral=np.zeros(2, dtype=bool), upper=np.array([3.0, 10.0])), 60.0
    )
    assert answer.proven
    assert answer.values == pytest.approx([3, 0.75])


def test_an_empty_program() -> None:
    assert solve(Builder().model(), 60.0).proven
    builder = Builder()
    builder.add_rows([], [], lower=1, count=1)
    assert solve(builder.model(), 60.0).status is Status.INFEASIBLE


def hard(seed: int = 0, count: int = 60) -> Model:
    """Return a market split problem (Cornuéjols and Dawande, 1998), which branch and bound cannot
    solve in practice beyond 30 variables.
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


def test_a_time_limit_returns_the_best_found() -> None:
    answer = solve(hard(), 1.0)
    assert answer.status is Status.FEASIBLE
    assert answer.bound <= answer.objective
    assert answer.gap > 0
    assert not hard().violation(answer.values)


def test_a_result_is_never_worse_than_its_start() -> None:
    model = hard(1)
    start = solve(model, 1.0).values
    answer = solve(model, 0.3, start=start, nodes=0)
    assert answer.found
    assert answer.objective <= model.objective(start)


def test_without_time_the_start_is_returned() -> None:
    model = knapsack()
    nothing = solve(model, 0.0)
    assert nothing.status is Status.UNKNOWN
    answer = solve(model, 0.0, start=np.array([1.0, 1.0]))
    assert (answer.status, answer.objective) == (Status.FEASIBLE, -8)
    assert answer.gap == np.inf


def test_an_invalid_start_is_rejected() -> None:
    with pytest.raises(AutopipeError, match="row 0 is missed by 5"):
        solve(knapsack(), 1.0, start=np.array([1.0, 3.0]))


@pytest.mark.parametrize(
    "wrong_values",
    [np.array([5.0, 0.0]), np.array([4.5, 0.0]), np.array([11.0, 0.0]), np.array([np.nan, 0.0])],
)
def test_invalid_values_of_a_solver_are_discarded(
    monkeypatch: pytest.MonkeyPatch, wrong_values: np.ndarray
) -> None:
    monkeypatch.setattr(
        milp_module,
        "solve_with_highs",
        lambda *_: MilpResult(Status.FEASIBLE, wrong_values, bound=-99.0),
    )
    assert solve(knapsack(), 1.0).status is Status.UNKNOWN
    begun = solve(knapsack(), 1.0, start=np.array([0.0, 1.0]))
    assert (begun.status, begun.values.tolist(), begun.bound) == (Status.FEASIBLE, [0, 1], -np.inf)


def test_an_invalid_result_is_replaced_by_a_run_without_presolve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    correct = milp_module.solve_with_highs

    def wrong_with_presolve(
        model: Model, seconds: float, gap: float, nodes: int | None, presolve: bool
    ) -> MilpResult | None:
        if presolve:
            return MilpResult(Status.FEASIBLE, np.array([5.0, 0.0]), bound=-15.0 * 2**11)
        return correct(model, seconds, gap, nodes, presolve)

    monkeypatch.setattr(milp_module, "solve_with_highs", wrong_with_presolve)
    answer = solve(knapsack(), 60.0)
    assert (answer.proven, answer.values.tolist()) == (True, [4, 0])


def test_a_valid_start_overrules_status_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp_module, "solve_with_highs", lambda *_: MilpResult(Status.INFEASIBLE))
    answer = solve(knapsack(), 1.0, start=np.array([0.0, 1.0]))
    assert (answer.status, answer.values.tolist()) == (Status.FEASIBLE, [0, 1])


def test_a_bound_below_the_values_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def unproven_result(model: Model, *_: object) -> MilpResult:
        bound = model.objective(np.array([4.0, 0.0]))
        return MilpResult(Status.FEASIBLE, np.array([2.0, 1.0]), bound=bound)

    monkeypatch.setattr(milp_module, "solve_with_highs", unproven_result)
    answer = solve(knapsack(), 1.0)
    assert (answer.status, answer.objective, answer.bound) == (Status.FEASIBLE, -11, -12)
    assert answer.gap == pytest.approx(1 / 11)
    assert solve(knapsack(), 1.0, gap=0.1).proven
