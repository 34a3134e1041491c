"""Integer linear programs, solved by HiGHS inside scipy or, through PuLP, by the solver that the
user names.

No solver is trusted: the values of every answer are checked against the program's own rows and
bounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopipe.ir.errors import AutopipeError
from autopipe.ir.words import plural
from autopipe.passes.solvers.pulp_client import AUTO, solve_with_pulp

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_INTEGRAL = 1e-5
"""How far from a whole number a solver may leave a variable that is one."""
_FEASIBLE = 1e-6
"""How far a row may be missed, of the largest term in it (or of 1)."""
_WRITTEN = 1e-6
"""Maximum distance from an integer at which a value read from a solver's text file is rounded to
that integer.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Minimise `cost · x` under `lower <= x <= upper` and `row_lower <= matrix x <= row_upper`.
    `cost`, `lower`, `upper` and `integral` (is x to be a whole number?) have an entry a variable.
    """

    cost: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    integral: NDArray[np.bool_]
    matrix: csr_array
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]

    @property
    def variables(self) -> int:
        return len(self.cost)

    def objective(self, x: NDArray[np.float64]) -> float:
        return float(self.cost @ x)

    def violation(self, x: NDArray[np.float64]) -> str:
        """The first row that `x` violates, in words; "" if none but by rounding errors."""
        if x.shape != (self.variables,) or not np.isfinite(x).all():
            return (
                f"{self.variables} finite {plural(self.variables, 'number is', 'numbers are')} "
                "needed"
            )
        broken = np.flatnonzero(self.integral & (x != np.rint(x)))
        if len(broken):
            return f"variable {broken[0]} is {x[broken[0]]:g}, not a whole number"
        broken = np.flatnonzero((x < self.lower) | (x > self.upper))
        if len(broken):
            return f"variable {broken[0]} is {x[broken[0]]:g}, out of its bounds"
        rows = len(self.row_lower)
        row = np.repeat(np.arange(rows), np.diff(self.matrix.indptr))
        terms = self.matrix.data * x[self.matrix.indices]
        scale = np.ones(rows)
        done = np.zeros(rows)
        np.maximum.at(scale, row, np.abs(terms))
        np.add.at(done, row, terms)
        missed = np.maximum(self.row_lower - done, done - self.row_upper)
        broken = np.flatnonzero(missed > _FEASIBLE * scale)
        return f"row {broken[0]} is missed by {missed[broken[0]]:g}" if len(broken) else ""


class Builder:
    """Collects variables and rows, many at a time, and gives the `Model` of them."""

    def __init__(self) -> None:
        self._variables: list[tuple[NDArray[np.float64], ...]] = []
        self._count = 0
        self._entries: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
        self._bounds: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        self._rows = 0

    def add_variables(
        self,
        count: int,
        cost: ArrayLike = 0.0,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = 1.0,
        integral: ArrayLike = True,
    ) -> NDArray[np.int64]:
        """The numbers of `count` new variables; what is said of them is one figure each, or one for
        all.
        """
        self._variables.append(
            tuple(_filled(each, count) for each in (cost, lower, upper, integral))
        )
        self._count += count
        return np.arange(self._count - count, self._count)

    def add_rows(
        self,
        row: ArrayLike,
        columns: ArrayLike,
        values: ArrayLike = 1.0,
        lower: ArrayLike = -np.inf,
        upper: ArrayLike = np.inf,
        count: int | None = None,
    ) -> None:
        """`count` new rows (the largest of `row` and one, if not given): entry i of `row` counts
        them from 0 on and takes `columns[i]` times `values[i]`. An entry given twice counts twice.
        """
        places = np.asarray(row, dtype=np.int64).ravel()
        wide = np.asarray(columns, dtype=np.int64).ravel()
        if count is None:
            count = int(places.max(initial=-1)) + 1
        self._entries.append((places + self._rows, wide, _filled(values, len(wide))))
        self._bounds.append((_filled(lower, count), _filled(upper, count)))
        self._rows += count

    def model(self) -> Model:
        """Raises AutopipeError for a row that names no variable of it, or figures that are none."""
        from scipy.sparse import coo_array

        cost, lower, upper, integral = _joined(self._variables, 4)
        rows, columns, values = _joined(self._entries, 3)
        if not ((columns >= 0) & (columns < self._count)).all():
            raise AutopipeError("a row of the integer program names a variable that it has not")
        if not np.isfinite(cost).all() or not np.isfinite(values).all():
            raise AutopipeError(
                "the integer program has costs or coefficients that are no finite numbers"
            )
        places = rows.astype(np.int64), columns.astype(np.int64)
        # One entry for a row and a variable: HiGHS refuses a program that has two.
        matrix = coo_array((values, places), shape=(self._rows, self._count)).tocsr()
        return Model(cost, lower, upper, integral.astype(bool), matrix, *_joined(self._bounds, 2))


def _filled(figures: ArrayLike, count: int) -> NDArray[np.float64]:
    return np.broadcast_to(np.asarray(figures, dtype=np.float64), (count,)).copy()


def _joined(parts: Sequence[tuple[NDArray[Any], ...]], width: int) -> list[NDArray[np.float64]]:
    """The parts' arrays, one after the other, by their place in the tuples."""
    return [
        np.concatenate([np.zeros(0), *(part[place] for part in parts)]) for place in range(width)
    ]


_LARGEST_COST = 2.0**14
"""Costs are scaled to it: solvers' tolerances (about 1e-6) are absolute."""
_SAME = 1e-9
"""Costs that differ by no more than this share are equal."""


class Status(Enum):
    OPTIMAL = "optimal"
    """Values whose cost is proven to be the least, within the gap that was asked for."""
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    """Proven: there are no values."""
    UNKNOWN = "unknown"
    """Neither values nor a proof within the limits."""

    @property
    def found(self) -> bool:
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, slots=True, eq=False)
class MilpResult:
    status: Status
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """One figure a variable, checked against every row; of length 0 where there are none."""
    objective: float = np.inf
    """Cost of the values; infinite where there are none."""
    bound: float = -np.inf
    """No values cost less, within the solver's tolerance; -infinity where nothing is known."""

    @property
    def found(self) -> bool:
        return self.status.found

    @property
    def proven(self) -> bool:
        return self.status is Status.OPTIMAL

    @property
    def gap(self) -> float:
        """The share of the cost by which it may be above the least; infinite where nothing is
        known.
        """
        if not self.found or self.bound == -np.inf:
            return np.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


_OPTIMAL = 0
_INFEASIBLE = 2
_UNBOUNDED = 3
_OTHER = 4
"""Codes of `scipy.optimize.milp`."""


def by_highs(
    model: Model, seconds: float, gap: float, nodes: int | None, presolve: bool
) -> MilpResult | None:
    """The claims of HiGHS, unchecked, on one thread; it takes no values to start from. None where
    it cannot say what it has found. The one inside scipy gets along with OR-tools in one process;
    the package highspy does not. Raises AutopipeError for a model that HiGHS does not accept, and
    for costs without a least.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows = (
        LinearConstraint(model.matrix, model.row_lower, model.row_upper)
        if len(model.row_lower)
        else None
    )
    options = {"time_limit": seconds, "mip_rel_gap": gap, "presolve": presolve}
    found = milp(
        model.cost,
        integrality=model.integral.astype(np.int64),
        bounds=Bounds(model.lower, model.upper),
        constraints=rows,
        options=options if nodes is None else options | {"node_limit": nodes},
    )
    if found.status == _OTHER and presolve:
        return None
    if found.status == _UNBOUNDED:
        raise AutopipeError("the integer program has no least cost: some variable lacks a bound")
    if found.status == _INFEASIBLE:
        # One code stands for no values and for a model that is refused.
        if "infeasible" not in found.message.lower():
            raise AutopipeError(f"HiGHS does not accept the integer program: {found.message}")
        return MilpResult(Status.INFEASIBLE)
    bound = (
        found.fun
        if found.mip_dual_bound is None and found.status == _OPTIMAL
        else found.mip_dual_bound
    )
    answer = MilpResult(Status.UNKNOWN, bound=-np.inf if bound is None else float(bound))
    return answer if found.x is None else replace(answer, status=Status.FEASIBLE, values=found.x)


def by_pulp(
    model: Model, solver: str, seconds: float, gap: float, nodes: int | None, presolve: bool
) -> MilpResult | None:
    """Return the unchecked answer of `solver` through PuLP, or None if the solver reports neither
    values nor a proof.

    PuLP returns no bound. If the solver states that its values are optimal within `gap`, the bound
    is their objective less that gap. Executables write values with few digits, so values next to an
    integer are rounded to it first; the check of `solve` rejects values for which that is wrong.
    Raises ConfigurationError if the solver is not installed or fails, AutopipeError if the
    objective has no minimum.
    """
    program = {
        "cost": model.cost,
        "lower": model.lower,
        "upper": model.upper,
        "integral": model.integral,
        "indptr": model.matrix.indptr,
        "indices": model.matrix.indices,
        "data": model.matrix.data,
        "row_lower": model.row_lower,
        "row_upper": model.row_upper,
    }
    answer = solve_with_pulp(program, solver, seconds, gap, nodes, presolve)
    if answer.values is not None:
        integers = np.rint(answer.values)
        values = np.where(np.abs(answer.values - integers) <= _WRITTEN, integers, answer.values)
        objective = model.objective(values)
        bound = objective - gap * abs(objective) if answer.is_optimal else -np.inf
        return MilpResult(Status.FEASIBLE, values, bound=bound)
    falls = ((model.cost < 0) & np.isposinf(model.upper)) | (
        (model.cost > 0) & np.isneginf(model.lower)
    )
    if answer.status == "Infeasible" and falls.any():
        # Some interfaces report an objective without a minimum as infeasible. Without costs only
        # the rows matter.
        rows = replace(model, cost=np.zeros_like(model.cost))
        without_costs = by_pulp(rows, solver, seconds, gap, nodes, presolve)
        if without_costs is not None and without_costs.found:
            answer = replace(answer, status="Unbounded")
    if answer.status == "Infeasible":
        return MilpResult(Status.INFEASIBLE)
    if answer.status == "Unbounded":
        raise AutopipeError(
            "the objective of the integer program has no minimum: some variable lacks a bound"
        )
    return None


def solve(
    model: Model,
    time_limit: float,
    gap: float = 0.0,
    start: NDArray[np.float64] | None = None,
    nodes: int | None = None,
    solver: str = AUTO,
) -> MilpResult:
    """Return the values with the minimum cost, or the best found within `time_limit` seconds and
    `nodes` search nodes.

    A cost counts as minimal if it exceeds its bound by at most the fraction `gap`. The result is
    never worse than the values `start`, which are the result if the solver finds none. `solver` is
    `auto` (HiGHS inside scipy) or a name of `pulp_client.SOLVER_NAMES`. Solvers run on one thread,
    so that equal programs have equal results unless the time limit ends a run. Raises AutopipeError
    if `start` violates a constraint or the objective has no minimum, ConfigurationError if the
    named solver is not installed or fails.
    """
    best = MilpResult(Status.UNKNOWN)
    if start is not None:
        if broken := model.violation(start):
            raise AutopipeError(
                f"the values to start an integer program from do not hold: {broken}"
            )
        best = MilpResult(Status.FEASIBLE, start, model.objective(start))
    if not model.variables:
        return _checked(model, MilpResult(Status.FEASIBLE, bound=0.0), gap) or MilpResult(
            Status.INFEASIBLE
        )
    end = time.monotonic() + time_limit
    scale = float(2.0 ** np.floor(np.log2(_LARGEST_COST / (np.abs(model.cost).max() or 1.0))))
    scaled = replace(model, cost=model.cost * scale)
    # Presolve alone cannot always say whether a program has no values or no least cost; and what it
    # says may not hold.
    for presolve in (True, False):
        left = end - time.monotonic()
        claim = None
        if left > 0 and solver == AUTO:
            claim = by_highs(scaled, left, gap, nodes, presolve)
        elif left > 0:
            claim = by_pulp(scaled, solver, left, gap, nodes, presolve)
        answer = _checked(model, replace(claim, bound=claim.bound / scale), gap) if claim else None
        if answer is None or (answer.status is Status.INFEASIBLE and best.found):
            continue
        if best.found and best.objective <= answer.objective:
            return _judged(replace(best, bound=answer.bound), gap)
        return answer
    return best


def _checked(model: Model, claim: MilpResult, gap: float) -> MilpResult | None:
    """The result that a claim proves; None where its values do not hold."""
    if not claim.found:
        return claim
    # Whole numbers made exactly whole, and all within their bounds.
    whole = np.rint(claim.values)
    close = model.integral & (np.abs(claim.values - whole) <= _INTEGRAL)
    values = np.clip(np.where(close, whole, claim.values), model.lower, model.upper)
    if model.violation(values):
        return None
    return _judged(MilpResult(Status.FEASIBLE, values, model.objective(values), claim.bound), gap)


def _judged(answer: MilpResult, gap: float) -> MilpResult:
    """The same, optimal where its bound says so."""
    if answer.objective - answer.bound <= _SAME * abs(answer.objective) + 1e-300:
        answer = replace(answer, bound=answer.objective)
    return replace(answer, status=Status.OPTIMAL if answer.gap <= gap else Status.FEASIBLE)
