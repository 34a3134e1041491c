"""Solve integer programs through PuLP, by a solver that the user chooses, in a separate process.

The process (`solvers/pulp_worker.py`) separates the library `highspy` from OR-tools, which contains
another version of HiGHS. It also isolates solvers that crash or ignore their time limit:
`_run_worker` kills the process and the solver that it started. `milp.solve` checks the values that
the process returns against every row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.output_files import scratch_folder
from autopipe.passes.solvers.pulp_worker import SOLVERS

AUTO: Final = "auto"
"""Name of the solver HiGHS inside scipy, which runs in this process and without PuLP. It was the
fastest solver in autopipe's measurements.
"""
SOLVER_NAMES: Final = (AUTO, *SOLVERS)
"""Allowed values of the option `solver`."""
_MODULE: Final = "autopipe.passes.solvers.pulp_worker"
_START_S: Final = 60.0
"""Seconds, in addition to the time limit, in which the process must start, build the program and
write the result.
"""
_ERROR_LENGTH: Final = 200
"""Maximum number of characters of a solver's error message that are reported."""


@cache
def installed_solvers() -> dict[str, str | None]:
    """Return, for each solver of `SOLVERS` by name, the PuLP interface that can run it on this
    machine, or None if the solver is not installed. Raise AutopipeError if PuLP cannot be loaded.
    """
    found: dict[str, str | None] = json.loads(_run_worker("--list", _START_S))
    return found


def check_installed(solver: str) -> None:
    """Raise ConfigurationError unless `solver` is `auto` or an installed solver that PuLP
    supports.
    """
    if solver not in SOLVER_NAMES:
        raise ConfigurationError(
            f"solver {solver!r} is unknown", hint=f"use one of {', '.join(SOLVER_NAMES)}"
        )
    if solver != AUTO and installed_solvers()[solver] is None:
        names = " or ".join(SOLVERS[solver])
        hint = "install the solver, or choose one that `autopipe config solvers` lists as installed"
        raise ConfigurationError(
            f"solver {solver!r} is not installed: PuLP cannot find {names}", hint=hint
        )


@dataclass(frozen=True, slots=True, eq=False)
class PulpResult:
    """Result of a solver that ran through PuLP. Its values are not checked against the program."""

    status: str
    """PuLP's name of the status: "Optimal", "Infeasible", "Unbounded", "Not Solved" or "Undefined".
    """
    is_optimal: bool
    """True if the solver states that the values are optimal within the requested gap."""
    values: NDArray[np.float64] | None
    """One value per variable; None if the solver found no values."""


def solve_with_pulp(
    program: dict[str, Any],
    solver: str,
    seconds: float,
    gap: float,
    nodes: int | None,
    presolve: bool,
) -> PulpResult:
    """Return the result of `solver` for an integer program, found within `seconds` and, if `nodes`
    is not None and the solver supports such a limit, within `nodes` search nodes.

    `program` contains the NumPy arrays that `pulp_worker.build_problem` reads. `gap` is the
    relative gap at which a solver may stop. Raise ConfigurationError if the solver is not installed
    or fails, for example because it has no license.
    """
    check_installed(solver)
    request = {
        "interface": installed_solvers()[solver],
        "seconds": seconds,
        "gap": gap,
        "nodes": nodes,
        "presolve": presolve,
    }
    # PuLP does not remove its files if the solver fails. A scratch folder removes them.
    with scratch_folder("milp") as folder:
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        np.savez(folder / "program.npz", **program)
        try:
            _run_worker(
                str(folder), seconds + _START_S, {"TMPDIR": str(folder), "TMP": str(folder)}
            )
        except subprocess.TimeoutExpired:  # The solver ignored its time limit and was killed.
            return PulpResult("Not Solved", is_optimal=False, values=None)
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        if answer["status"] == "failed":
            reason = " ".join(answer["error"].split())[:_ERROR_LENGTH]
            hint = "check the solver's license and installation, or set solver to auto"
            raise ConfigurationError(f"solver {solver!r} failed: {reason}", hint=hint)
        values = folder / "values.npy"
        found = np.load(values, allow_pickle=False) if values.exists() else None
    return PulpResult(answer["status"], answer["is_optimal"], found)


def _run_worker(argument: str, seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Run the worker process with the command-line argument `argument`, and return its standard
    output. `environment` contains environment variables in addition to those of this process.

    The worker and the solver that it starts form a process group. The group is killed when the time
    is over or this process is interrupted. Raise TimeoutExpired after `seconds`, and AutopipeError
    if the worker fails.
    """
    packages = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise AutopipeError(
            f"the process of the integer program failed: {lines[-1][:_ERROR_LENGTH]}"
        )
    return output
