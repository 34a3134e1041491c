"""Integer programs through PuLP: equal optima, and solvers that are missing, fail, or ignore their
time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopipe.configs.configuration import Configuration
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.passes.solvers import pulp_client
from autopipe.passes.solvers.milp import Builder, Model, Status, solve
from tests.passes.solvers.milp.test_solve import knapsack, minimum_by_brute_force, programs

SOLVERS = ("highs", "cbc")
"""Solvers of the test environment: PuLP contains CBC on x86-64 and Arm Linux, the extra `test`
contains highspy.
"""


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=programs())
def test_the_optimum_is_the_minimum_over_all_values(solver: str, model: Model) -> None:
    minimum = minimum_by_brute_force(model)
    answer = solve(model, 60.0, solver=solver)
    if np.isinf(minimum):
        assert answer.status is Status.INFEASIBLE
        return
    assert answer.proven
    assert not model.violation(answer.values)
    assert answer.objective == pytest.approx(minimum)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_optimum_is_proven(solver: str) -> None:
    answer = solve(knapsack(), 60.0, solver=solver)
    assert (answer.status, answer.values.tolist(), answer.objective) == (
        Status.OPTIMAL,
        [4, 0],
        -12,
    )
    assert (answer.bound, answer.gap) == (-12, 0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_program_without_values_is_infeasible(solver: str) -> None:
    builder = Builder()
    builder.add_variables(2)
    builder.add_rows([0, 0], [0, 1], lower=3.0)
    assert solve(builder.model(), 60.0, solver=solver).status is Status.INFEASIBLE


@pytest.mark.parametrize("solver", SOLVERS)
def test_costs_without_a_minimum_are_an_error(solver: str) -> None:
    builder = Builder()
    builder.add_variables(1, cost=-1.0, upper=np.inf)
    with pytest.raises(AutopipeError, match="minimum"):
        solve(builder.model(), 60.0, solver=solver)


def test_the_start_is_returned_if_nothing_better_is_found() -> None:
    start = np.array([4.0, 0.0])
    answer = solve(knapsack(), 60.0, start=start, solver="cbc")
    assert answer.proven
    assert answer.values.tolist() == [4, 0]


def test_the_configuration_accepts_the_names_of_all_solvers() -> None:
    assert get_args(get_type_hints(Configuration)["solver"]) == pulp_client.SOLVER_NAMES


def test_a_missing_solver_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match="'cuopt' is not installed: PuLP cannot find CUOPT"
    ) as caught:
        solve(knapsack(), 60.0, solver="cuopt")
    assert "autopipe config solvers" in caught.value.hint


def test_an_unknown_solver_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'cbcc' is unknown"):
        solve(knapsack(), 60.0, solver="cbcc")


def test_the_process_loads_neither_ortools_nor_scipy() -> None:
    code = (
        "import sys, autopipe.passes.solvers.pulp_worker as worker; "
        "worker.installed_interface('cbc'); "
        "print(sorted({'ortools', 'scipy', 'onnx'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def fake_scip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write an executable `scip` and put it first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    pulp_client.installed_solvers.cache_clear()
    yield tmp_path / "scip"
    pulp_client.installed_solvers.cache_clear()


def write_executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def test_a_solver_that_fails_is_one_line_and_leaves_no_files(
    fake_scip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for name in ("TMPDIR", "TMP"):
        monkeypatch.setenv(name, str(temporary))
    write_executable(fake_scip, "echo no license >&2; exit 7")
    with pytest.raises(
        ConfigurationError, match="solver 'scip' failed: its command ended with exit code 7"
    ) as caught:
        solve(knapsack(), 60.0, solver="scip")
    assert "\n" not in str(caught.value)
    assert list(temporary.iterdir()) == []


def test_a_solver_that_ignores_its_time_limit_is_killed(
    fake_scip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_executable(fake_scip, f"echo $$ > {tmp_path}/pid; exec sleep 300")
    pulp_client.check_installed("scip")
    monkeypatch.setattr(pulp_client, "_START_S", 3.0)
    assert solve(knapsack(), 0.1, solver="scip").status is Status.UNKNOWN
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} of the solver is still there")


def test_the_solver_ends_with_the_process_that_started_it(fake_scip: Path, tmp_path: Path) -> None:
    write_executable(fake_scip, f"echo $$ > {tmp_path}/pid; exec sleep 300")
    code = (
        "from tests.passes.solvers.milp.test_solve import knapsack; from "
        "autopipe.passes.solvers.milp import solve; "
        "solve(knapsack(), 300.0, solver='scip')"
    )
    planning = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(600):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(encoding="utf-8").strip():
            break
        time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert is_running(pid)
    planning.kill()
    planning.wait()
    for _ in range(200):
        if not is_running(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} of the solver is still there")


def is_running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
