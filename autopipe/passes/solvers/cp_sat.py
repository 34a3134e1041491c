"""Run CP-SAT, the constraint solver of OR-tools, with one worker: its limits, and its result with a
proven bound.

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
"""Callback of a run: called with (objective, lower bound of the objective) of each solution that is
better than all earlier solutions.
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits and random seed of one run of CP-SAT. The limit that is reached first ends the run."""

    seconds: float
    """Maximum wall-clock time in seconds."""
    work: float
    """Maximum deterministic time of the solver, which counts its operations. If this limit ends the
    run, the result does not depend on the speed of the machine.
    """
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CpResult:
    """Result of one run of CP-SAT. Without an objective, all valid values count as optimal."""

    status: Status
    values: tuple[int, ...] = ()
    """Values of the requested variables, in their order; () if none were found."""
    bound: int | None = None
    """Lower bound of the objective; None if there is no objective or no bound was found."""
    work: float = 0.0
    """Deterministic time that the run took, in the unit of `Limit.work`."""

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
    """Run CP-SAT with one search worker, and return the result with the values of `variables`.

    Equal models and seeds give equal results, unless `limit.seconds` ends the run. `relax` adds
    linear relaxations. They help if sums decide the objective. For models that order tasks they are
    weak and take most of the time. `on_solution` is called for each better solution.

    Raise AutopipeError for a model that the solver rejects, and KeyboardInterrupt after Ctrl-C.
    """
    from ortools.sat.python import cp_model

    if limit.seconds <= 0 or limit.work <= 0:
        return CpResult(Status.UNKNOWN)

    class SolutionCallback(cp_model.CpSolverSolutionCallback):
        """Passes each solution that CP-SAT reports to `on_solution`."""

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
    """Run CP-SAT in such a way that Ctrl-C raises KeyboardInterrupt, and return the status.

    The SIGINT handler of OR-tools would end the run without an error and then leave SIGINT at its
    default action, so that the next Ctrl-C would kill the process. It is disabled here. Python's
    own handler runs only while the main thread executes Python code. The solver therefore runs in
    another thread, and the caller's thread waits.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as threads:
        search = threads.submit(solver.solve, model, callback)
        try:
            return search.result()
        finally:
            # A request to stop is ignored before the solver begins, so repeat it until the thread
            # of the solver ends.
            while not search.done():
                solver.stop_search()
                wait([search], _STOP_S)


def _rounded_up(bound: float) -> int | None:
    """Return `bound` rounded up to an integer; None if it is infinite. A bound that exceeds an
    integer by at most 1e-6, a rounding error, gives this integer.
    """
    return math.ceil(bound - 1e-6) if math.isfinite(bound) else None
