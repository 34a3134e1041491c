"""Process in which PuLP solves one integer program: `python -m autopipe.passes.solvers.pulp_worker
FOLDER`.

PuLP loads the library `highspy` if it is installed, and OR-tools contains another version of HiGHS.
This process imports neither OR-tools nor modules that do, so that it has only one of the two
versions. FOLDER contains the request, which `solvers/pulp_client.py` writes:

- `request.json`: `interface` (an installed PuLP interface of `SOLVERS`), `seconds`, `gap`, `nodes`
  (or null) and `presolve`;
- `program.npz`: the arrays of `solvers/milp.Model`, the matrix as compressed sparse rows.

The process writes `answer.json` (`status`, `is_optimal`, and `error` if the solver failed) and, if
the solver found values, `values.npy` with one number per variable. With `--list` instead of FOLDER,
it prints a JSON object with the name of the installed PuLP interface of each solver, or null.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SOLVERS: Final[Mapping[str, tuple[str, ...]]] = {
    "highs": ("HiGHS", "HiGHS_CMD"),
    "cbc": ("COIN_CMD", "PULP_CBC_CMD"),
    "scip": ("SCIP_CMD", "SCIP_PY"),
    "gurobi": ("GUROBI", "GUROBI_CMD"),
    "cplex": ("CPLEX_PY", "CPLEX_CMD"),
    "xpress": ("XPRESS_PY", "XPRESS_CMD"),
    "mosek": ("MOSEK",),
    "copt": ("COPT", "COPT_CMD"),
    "cuopt": ("CUOPT",),
}
"""By name of a solver, the PuLP interfaces that can run it. The first interface that is installed
is used.
"""

_PARENT_CHECK_S: Final = 0.5
"""Seconds between two checks whether the parent process still exists."""

Arrays = Mapping[str, NDArray[Any]]


def installed_interface(name: str) -> str | None:
    """Return the first PuLP interface of solver `name` that is installed and usable, or None."""
    import pulp

    silent = {"msg": False, "_skip_v4_deprecation": True}
    for interface in SOLVERS[name]:
        try:
            if pulp.getSolver(interface, **_accepted_options(interface, silent)).available():
                return interface
        except Exception:  # noqa: BLE001 - e.g. a missing license: the interface is not available
            continue
    return None


def _accepted_options(interface: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the entries of `options` that the constructor of a PuLP interface accepts by name."""
    import pulp

    constructor = next(each for each in pulp.apis._all_solvers if each.name == interface)
    accepted: set[str] = set()
    for base in constructor.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            accepted |= parameters.keys()
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                break
    return {name: value for name, value in options.items() if name in accepted}


def build_problem(arrays: Arrays) -> tuple[Any, list[Any]]:
    """Return (problem, variables): the integer program as PuLP problem, and its variables in the
    order of `arrays["cost"]`.

    `arrays` contains the fields of `solvers/milp.Model` by name, with the matrix as compressed
    sparse rows `indptr`, `indices` and `data`. A row with two different finite bounds becomes two
    constraints.
    """
    import pulp

    problem = pulp.LpProblem("autopipe", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            f"x{number}",
            float(lower) if np.isfinite(lower) else None,
            float(upper) if np.isfinite(upper) else None,
            pulp.LpInteger if is_integral else pulp.LpContinuous,
        )
        for number, (lower, upper, is_integral) in enumerate(
            zip(arrays["lower"], arrays["upper"], arrays["integral"], strict=True)
        )
    ]
    problem += pulp.LpAffineExpression(zip(variables, arrays["cost"].tolist(), strict=True))
    starts = arrays["indptr"].tolist()
    columns = arrays["indices"].tolist()
    values = arrays["data"].tolist()
    for row, (lower, upper) in enumerate(
        zip(arrays["row_lower"], arrays["row_upper"], strict=True)
    ):
        entries = range(starts[row], starts[row + 1])
        expression = pulp.LpAffineExpression(
            [(variables[columns[entry]], values[entry]) for entry in entries]
        )
        if lower == upper:
            problem += expression == float(lower), f"r{row}"
            continue
        if np.isfinite(lower):
            problem += expression >= float(lower), f"r{row}_lower"
        if np.isfinite(upper):
            problem += expression <= float(upper), f"r{row}_upper"
    return problem, variables


def solve(folder: Path) -> dict[str, Any]:
    """Solve the request in `folder`, and return the content of `answer.json` for `main` to write.
    Write `values.npy` if values were found.
    """
    import pulp

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    interface = request["interface"]
    with np.load(folder / "program.npz", allow_pickle=False) as arrays:
        problem, variables = build_problem(dict(arrays))
    options = {
        "msg": False,
        "timeLimit": request["seconds"],
        "gapRel": request["gap"],
        "presolve": request["presolve"],
        "maxNodes": request["nodes"],
        "threads": 1,
        "_skip_v4_deprecation": True,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        problem.solve(pulp.getSolver(interface, **_accepted_options(interface, given)))
    except subprocess.CalledProcessError as error:
        reason = f"its command ended with exit code {error.returncode}"
        return {"status": "failed", "is_optimal": False, "error": reason}
    except Exception as error:  # noqa: BLE001 - each interface has different exception classes
        return {
            "status": "failed",
            "is_optimal": False,
            "error": f"{type(error).__name__}: {error}",
        }
    status = pulp.LpStatus[problem.status]
    if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        # PuLP omits a variable that occurs in no row and has no cost. Any value is valid; use its
        # lower bound.
        found = [
            each.lowBound or 0.0 if each.varValue is None else each.varValue for each in variables
        ]
        np.save(folder / "values.npy", np.array(found, dtype=np.float64), allow_pickle=False)
    return {
        "status": status,
        "is_optimal": problem.sol_status == pulp.LpSolutionOptimal,
        "error": "",
    }


def end_with_parent(parent: int) -> None:
    """Wait until the process with id `parent` has ended, and then kill this process group, which
    includes the solver. Run this in a thread of its own.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(words: list[str]) -> int:
    """Run the worker with the command-line arguments `words`, and return the exit code."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    if words == ["--list"]:
        sys.stdout.write(json.dumps({name: installed_interface(name) for name in SOLVERS}) + "\n")
        return 0
    folder = Path(words[0])
    answer = solve(folder)
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
