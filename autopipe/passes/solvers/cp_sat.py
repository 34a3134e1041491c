"""CP-SAT of OR-tools with one worker: limits, result and proven bound.

The values of a result are unchecked. Callers check them against their problem before they use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.errors import AutopipeError
from autopipe.passes.solvers.milp import Status

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import (
        CpModel,
        CpSolver,
        CpSolverSolutionCallback,
        CpSolverStatus,
        IntVar,
    )

__all__ = ["CpResult", "Limit", "OnSolution", "Status", "solve"]

OnSolution = Callable[[int, int], None]
"""Called with the objective and its bound for each solution that is better than all before."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits and seed of a run."""

    seconds: float
    """Maximum seconds of the clock."""
    work: float
    """Maximum deterministic time of the solver. On a fast machine it ends the run, always with the
    same result.
    """
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CpResult:
    """Result of a run. Without an objective, any values are optimal."""

    status: Status
    values: tuple[int, ...] = ()
    """Values of the requested variables, in their order; () if none were found."""
    bound: int | None = None
    """Lower bound of the objective; None without an objective or without a bound."""
    work: float = 0.0
    """Deterministic time of the run."""

    @property
    def found(self) -> bool:
        """True if the result contains values."""
        return self.status.found


def solve(
    model: CpModel,
    variables: Sequence[IntVar],
    limit: Limit,
    on_solution: OnSolution | None = None,
    relax: bool = False,
) -> CpResult:
    """Run CP-SAT with one search worker and return the result.

    Equal models and seeds give equal results as long as `limit.work` ends the run. `relax` adds
    linear relaxations, for models with decisive sums; for orders of blocks the relaxations are weak
    and take most of the time. Raise AutopipeError for a model that the solver rejects, and
    KeyboardInterrupt after Ctrl-C.
    """
    from ortools.sat.python import cp_model

    if limit.seconds <= 0 or limit.work <= 0:
        return CpResult(Status.UNKNOWN)

    class SolutionCallback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            if on_solution is not None:
                on_solution(
                    round(self.objective_value), _rounded_up(self.best_objective_bound) or 0
                )

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit.seconds
    solver.parameters.max_deterministic_time = limit.work
    solver.parameters.random_seed = limit.seed
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = int(relax)
    code = _search(solver, model, SolutionCallback() if on_solution else None)
    if code == cp_model.MODEL_INVALID:
        raise AutopipeError(f"CP-SAT rejects the model: {model.validate()}")
    status = Status[solver.status_name(code)]
    work = float(solver.response_proto.deterministic_time)
    bound = _rounded_up(solver.best_objective_bound) if model.has_objective() else None
    if status.found:
        return CpResult(
            status, tuple(int(solver.value(variable)) for variable in variables), bound, work
        )
    return CpResult(status, (), bound if status is Status.UNKNOWN else None, work)


_STOP_S = 0.05
"""Seconds between two requests to stop a search."""


def _search(
    solver: CpSolver, model: CpModel, callback: CpSolverSolutionCallback | None
) -> CpSolverStatus:
    """Return the status of a run that Ctrl-C ends with KeyboardInterrupt.

    OR-tools' own SIGINT handler would end the run without an error and leave SIGINT at its default
    action, so the next Ctrl-C would kill the process. Without it, Python's handler runs, but only
    while the main thread executes Python code. The run therefore has its own thread, and the
    caller's thread waits.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as threads:
        search = threads.submit(solver.solve, model, callback)
        try:
            return search.result()
        finally:
            # A request to stop has no effect if the run has not begun, so it is repeated.
            while not search.done():
                solver.stop_search()
                wait([search], _STOP_S)


def _rounded_up(bound: float) -> int | None:
    """Return the smallest integer that is not below `bound`, up to rounding errors; None if it is
    infinite.
    """
    return math.ceil(bound - 1e-6) if math.isfinite(bound) else None
