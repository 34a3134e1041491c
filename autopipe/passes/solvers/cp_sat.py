"""OR-tools' CP-SAT on one worker: what a run found, what it proved, and how long it may take.

An answer's values are claims of the solver. Callers check them against their own problem before
using them.
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
"""Called with the objective and its bound at every solution that is better than those before."""


@dataclass(frozen=True, slots=True)
class Limit:
    """When to stop, and with which seed to begin."""

    seconds: float
    """Of the clock: never exceeded by much, so that a slow machine keeps its time."""
    work: float
    """In the solver's deterministic time: what stops it on a machine fast enough, always at the
    same answer.
    """
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CpResult:
    """Result and bound of a minimisation; optimal, too, are any values where there is no
    objective.
    """

    status: Status
    values: tuple[int, ...] = ()
    """Of the variables asked for, in their order; () where none were found."""
    bound: int | None = None
    """No values have a smaller objective; None without an objective, or where nothing is known."""
    work: float = 0.0

    @property
    def found(self) -> bool:
        return self.status.found


def solve(
    model: CpModel,
    variables: Sequence[IntVar],
    limit: Limit,
    on_solution: OnSolution | None = None,
    relax: bool = False,
) -> CpResult:
    """Return the result of CP-SAT with one search worker.

    Equal models and seeds give equal results as long as `limit.work` ends the search. `relax` adds
    linear relaxations, for models in which sums decide; for orders of blocks the relaxations are
    weak and take most of the time. Raises AutopipeError for a model that the solver rejects, and
    KeyboardInterrupt after Ctrl-C.
    """
    from ortools.sat.python import cp_model

    if limit.seconds <= 0 or limit.work <= 0:
        return CpResult(Status.UNKNOWN)

    class Watcher(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            if on_solution is not None:
                on_solution(round(self.objective_value), _whole(self.best_objective_bound) or 0)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit.seconds
    solver.parameters.max_deterministic_time = limit.work
    solver.parameters.random_seed = limit.seed
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = int(relax)
    code = _search(solver, model, Watcher() if on_solution else None)
    if code == cp_model.MODEL_INVALID:
        raise AutopipeError(f"the solver does not accept the model: {model.validate()}")
    status = Status[solver.status_name(code)]
    work = float(solver.response_proto.deterministic_time)
    bound = _whole(solver.best_objective_bound) if model.has_objective() else None
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
    """Return the status of a search that Ctrl-C ends with KeyboardInterrupt.

    OR-tools' own handler of SIGINT would end the search without an error, and leave SIGINT at its
    default: the next Ctrl-C would kill the process. Without it, Python's handler stays, which runs
    only while the main thread runs Python code. The search therefore has a thread of its own, and
    the caller's thread waits.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as threads:
        search = threads.submit(solver.solve, model, callback)
        try:
            return search.result()
        finally:
            # A request is lost if the search has not begun, so it is repeated.
            while not search.done():
                solver.stop_search()
                wait([search], _STOP_S)


def _whole(bound: float) -> int | None:
    """A bound on whole numbers, rounded up but for rounding errors."""
    return math.ceil(bound - 1e-6) if math.isfinite(bound) else None
