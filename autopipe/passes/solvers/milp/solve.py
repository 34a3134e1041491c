"""One call for an integer program, whichever solver runs; what it claims is checked before it is believed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import AutopipeError, InfeasibleError
from autopipe.passes.solvers.milp.cbc import by_cbc
from autopipe.passes.solvers.milp.claim import Limits, SolverReport
from autopipe.passes.solvers.milp.highs import by_highs
from autopipe.passes.solvers.milp.model import Model

SolverName = Literal["auto", "cbc", "highs"]
"""`auto` asks HiGHS, and CBC where what HiGHS says does not hold."""
_LARGEST_COST = 2.0**14
"""Costs are scaled to it: solvers' tolerances (about 1e-6) are absolute."""
_SAME = 1e-9
"""Costs that differ by no more than this share are equal."""


class Status(Enum):
    """End of a run."""

    OPTIMAL = "optimal"
    """Values whose cost is proven to be the least, within the gap that was asked for."""
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    """Proven: there are no values."""
    UNKNOWN = "unknown"
    """Neither values nor a proof within the limits."""


@dataclass(frozen=True, slots=True, eq=False)
class MilpResult:
    """Result and bound of a run."""

    status: Status
    values: NDArray[np.float64]
    """One figure a variable, checked against every row; of length 0 where there are none."""
    objective: float
    """Cost of the values; infinite where there are none."""
    bound: float
    """No values cost less, within the solver's tolerance; -infinity where nothing is known."""

    @property
    def found(self) -> bool:
        """True if there are values."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def proven(self) -> bool:
        """True if the values are proven to cost the least, within the gap that was asked for."""
        return self.status is Status.OPTIMAL

    @property
    def gap(self) -> float:
        """The share of the cost by which it may be above the least; infinite where nothing is known."""
        if not self.found or self.bound == -np.inf:
            return np.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)

    def required(self, what: str) -> Self:
        """This answer, which has values. Raises InfeasibleError, saying of `what`, where it has none."""
        if self.status is Status.INFEASIBLE:
            raise InfeasibleError(f"{what}: no choice keeps every constraint")
        if not self.found:
            raise InfeasibleError(f"{what}: no choice was found within the time limit", hint="allow more time")
        return self


def solve(
    model: Model,
    time_limit: float,
    gap: float = 0.0,
    start: NDArray[np.float64] | None = None,
    solver: SolverName = "auto",
    nodes: int | None = None,
    seed: int = 0,
) -> MilpResult:
    """The values that cost the least, or the best found within `time_limit` seconds and `nodes` nodes of the search.

    An answer is never worse than the values `start`, which are the answer where a solver finds none; CBC begins its
    search there. One thread and one seed: the same answer again unless the clock ends a run.
    Raises AutopipeError for a `start` that breaks a constraint, and where costs have no least.
    """
    best = MilpResult(Status.UNKNOWN, np.zeros(0), np.inf, -np.inf)
    if start is not None:
        if broken := model.violation(start):
            raise AutopipeError(f"the values to start an integer program from do not hold: {broken}")
        best = MilpResult(Status.FEASIBLE, start, model.objective(start), -np.inf)
    if not model.variables:
        return _of_nothing(model, gap)
    end = time.monotonic() + time_limit
    scale = float(2.0 ** np.floor(np.log2(_LARGEST_COST / (np.abs(model.cost).max() or 1.0))))
    scaled = replace(model, cost=model.cost * scale)
    for name in ("highs", "cbc") if solver == "auto" else (solver,):
        limits = Limits(end - time.monotonic(), nodes, gap, seed)
        if limits.seconds <= 0:
            break
        claim = by_highs(scaled, limits) if name == "highs" else by_cbc(scaled, limits, start)
        answer = _checked(model, replace(claim, bound=claim.bound / scale), gap)
        if answer is None or (answer.status is Status.INFEASIBLE and best.found):
            continue
        return _better(best, answer, gap)
    return best


def _checked(model: Model, claim: SolverReport, gap: float) -> MilpResult | None:
    """The checked part of a result; None where its values do not hold.

    Raises AutopipeError for costs without a least.
    """
    nothing = MilpResult(Status.UNKNOWN, np.zeros(0), np.inf, -np.inf)
    if claim.unbounded:
        raise AutopipeError("the integer program has no least cost: some variable lacks a bound")
    if claim.infeasible:
        return replace(nothing, status=Status.INFEASIBLE)
    if claim.values is None:
        return replace(nothing, bound=claim.bound)
    values = model.settled(claim.values)
    if model.violation(values):
        return None
    return _judged(MilpResult(Status.FEASIBLE, values, model.objective(values), claim.bound), gap)


def _judged(answer: MilpResult, gap: float) -> MilpResult:
    """The same, optimal where its bound says so."""
    if answer.objective - answer.bound <= _SAME * abs(answer.objective) + 1e-300:
        answer = replace(answer, bound=answer.objective)
    return replace(answer, status=Status.OPTIMAL if answer.gap <= gap else Status.FEASIBLE)


def _better(start: MilpResult, answer: MilpResult, gap: float) -> MilpResult:
    if start.objective <= answer.objective and start.found:
        return _judged(replace(start, bound=answer.bound), gap)
    return answer


def _of_nothing(model: Model, gap: float) -> MilpResult:
    """The answer of a program without variables."""
    values = np.zeros(0)
    if model.violation(values):
        return MilpResult(Status.INFEASIBLE, values, np.inf, -np.inf)
    return _judged(MilpResult(Status.FEASIBLE, values, 0.0, 0.0), gap)
