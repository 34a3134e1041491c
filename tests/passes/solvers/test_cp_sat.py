"""What the door to CP-SAT says of a run."""

from __future__ import annotations

import pytest
from ortools.sat.python import cp_model

from autopipe.ir.errors import AutopipeError
from autopipe.passes.solvers.cp_sat import Limit, Status, solve

AMPLE = Limit(60.0, 10.0)


def knapsack() -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """The most of 3a + 5b under 2a + 4b <= 9: 12."""
    model = cp_model.CpModel()
    names = [model.new_int_var(0, 10, name) for name in "ab"]
    model.add(2 * names[0] + 4 * names[1] <= 9)
    model.minimize(-3 * names[0] - 5 * names[1])
    return model, names


def test_an_optimum_is_told_as_one() -> None:
    told: list[tuple[int, int]] = []
    answer = solve(*knapsack(), AMPLE, lambda value, bound: told.append((value, bound)))
    assert (answer.status, answer.values, answer.bound) == (Status.OPTIMAL, (4, 0), -12)
    assert answer.found
    assert told[-1][0] == -12
    assert all(bound <= value for value, bound in told)


def test_no_values_are_told_as_proven() -> None:
    model, names = knapsack()
    model.add(names[0] + names[1] >= 6)
    answer = solve(model, names, AMPLE)
    assert (answer.status, answer.values, answer.bound, answer.found) == (Status.INFEASIBLE, (), None, False)


def test_values_alone_have_no_bound() -> None:
    model = cp_model.CpModel()
    name = model.new_int_var(3, 3, "")
    answer = solve(model, [name], AMPLE)
    assert (answer.status, answer.values, answer.bound) == (Status.OPTIMAL, (3,), None)


@pytest.mark.parametrize("limit", [Limit(0.0, 1.0), Limit(1.0, 0.0), Limit(-1.0, 1.0)])
def test_no_time_is_no_answer(limit: Limit) -> None:
    assert solve(*knapsack(), limit).status is Status.UNKNOWN


def test_a_model_that_makes_no_sense_is_refused() -> None:
    model = cp_model.CpModel()
    model.add_linear_expression_in_domain(
        model.new_int_var(0, 2**62, "") + model.new_int_var(0, 2**62, ""), cp_model.Domain(0, 1)
    )
    with pytest.raises(AutopipeError, match="does not accept"):
        solve(model, [], AMPLE)
