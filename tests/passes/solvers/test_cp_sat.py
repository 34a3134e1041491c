"""Results of CP-SAT runs: status, bound, limits, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from ortools.sat.python import cp_model

from autopipe.ir.errors import AutopipeError
from autopipe.passes.solvers.cp_sat import Limit, Status, solve

AMPLE = Limit(60.0, 10.0)


def knapsack() -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """Return the model: maximise 3a + 5b subject to 2a + 4b <= 9. The maximum is 12."""
    model = cp_model.CpModel()
    names = [model.new_int_var(0, 10, name) for name in "ab"]
    model.add(2 * names[0] + 4 * names[1] <= 9)
    model.minimize(-3 * names[0] - 5 * names[1])
    return model, names


def test_an_optimum_has_status_optimal() -> None:
    told: list[tuple[int, int]] = []
    answer = solve(*knapsack(), AMPLE, lambda value, bound: told.append((value, bound)))
    assert (answer.status, answer.values, answer.bound) == (Status.OPTIMAL, (4, 0), -12)
    assert answer.found
    assert told[-1][0] == -12
    assert all(bound <= value for value, bound in told)


def test_an_infeasible_model_has_status_infeasible() -> None:
    model, names = knapsack()
    model.add(names[0] + names[1] >= 6)
    answer = solve(model, names, AMPLE)
    assert (answer.status, answer.values, answer.bound, answer.found) == (
        Status.INFEASIBLE,
        (),
        None,
        False,
    )


def test_without_an_objective_there_is_no_bound() -> None:
    model = cp_model.CpModel()
    name = model.new_int_var(3, 3, "")
    answer = solve(model, [name], AMPLE)
    assert (answer.status, answer.values, answer.bound) == (Status.OPTIMAL, (3,), None)


@pytest.mark.parametrize("limit", [Limit(0.0, 1.0), Limit(1.0, 0.0), Limit(-1.0, 1.0)])
def test_without_time_there_is_no_result(limit: Limit) -> None:
    assert solve(*knapsack(), limit).status is Status.UNKNOWN


def test_an_invalid_model_is_rejected() -> None:
    model = cp_model.CpModel()
    model.add_linear_expression_in_domain(
        model.new_int_var(0, 2**62, "") + model.new_int_var(0, 2**62, ""), cp_model.Domain(0, 1)
    )
    with pytest.raises(AutopipeError, match="rejects the model"):
        solve(model, [], AMPLE)


INTERRUPTED = """
import os, signal, sys
from ortools.sat.python import cp_model
from autopipe.passes.solvers.cp_sat import Limit, solve

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

model = cp_model.CpModel()
marks = [model.new_int_var(0, 400, f"mark {index}") for index in range(16)]
gaps = []
for index, mark in enumerate(marks[1:], 1):
    model.add(mark > marks[index - 1])
    for earlier in marks[:index]:
        gap = model.new_int_var(1, 400, "gap")
        model.add(gap == mark - earlier)
        gaps.append(gap)
model.add_all_different(gaps)
if sys.argv[1] == "during":
    model.minimize(marks[-1])
try:
    solve(model, marks, Limit(600.0, 600.0), interrupt if sys.argv[1] == "during" else None)
    print("solved", flush=True)
    if sys.argv[1] == "after":
        interrupt()
except KeyboardInterrupt:
    print("interrupted")
"""
"""Ctrl-C at the first solution of a Golomb ruler with 16 marks, whose optimum cannot be proven
within ten minutes, or after the search.
"""


@pytest.mark.parametrize(
    ("moment", "printed"), [("during", "interrupted"), ("after", "solved interrupted")]
)
def test_ctrl_c_raises_keyboard_interrupt_during_and_after_a_search(
    moment: str, printed: str
) -> None:
    command = [sys.executable, "-c", INTERRUPTED, moment]
    # Python installs no handler in a process that ignores SIGINT at its start, such as a background
    # job.
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout.split() == printed.split(), run.stderr
    assert run.returncode == 0
