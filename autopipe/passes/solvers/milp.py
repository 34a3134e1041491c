"""Integer linear programs, solved by HiGHS inside scipy or, through PuLP, by a chosen solver.

The values that a solver returns are checked against all rows and bounds of the program.
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

_INTEGRALITY_TOLERANCE = 1e-5
"""Maximum distance from an integer that a solver may leave an integer variable."""
_ROW_TOLERANCE = 1e-6
"""Maximum violation of a row, relative to the largest absolute term of the row, or to 1 if all
terms are smaller.
"""
_TEXT_TOLERANCE = 1e-6
"""Maximum distance from an integer at which a value read from a solver's text file is rounded to
that integer.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """An integer linear program: minimise `cost · x` subject to `lower <= x <= upper` and
    `row_lower <= matrix x <= row_upper`. `integral` is True for the variables that must be
    integers.
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
        """Number of variables."""
        return len(self.cost)

    def objective(self, x: NDArray[np.float64]) -> float:
        """Return the cost of `x`."""
        return float(self.cost @ x)

    def violation(self, x: NDArray[np.float64]) -> str:
        """Return a description of the first constraint that `x` violates, or "" if it violates
        none. Rows may be violated by rounding errors, integers and bounds of variables may not.
        """
        if x.shape != (self.variables,) or not np.isfinite(x).all():
            return (
                f"{self.variables} finite {plural(self.variables, 'value is', 'values are')} "
                "required"
            )
        violated = np.flatnonzero(self.integral & (x != np.rint(x)))
        if len(violated):
            return f"variable {violated[0]} is {x[violated[0]]:g}, not an integer"
        violated = np.flatnonzero((x < self.lower) | (x > self.upper))
        if len(violated):
            index = violated[0]
            bounds = f"{self.lower[index]:g} to {self.upper[index]:g}"
            return f"variable {index} is {x[index]:g}, outside of its bounds {bounds}"
        rows = len(self.row_lower)
        row = np.repeat(np.arange(rows), np.diff(self.matrix.indptr))
        terms = self.matrix.data * x[self.matrix.indices]
        scale = np.ones(rows)
        activity = np.zeros(rows)
        np.maximum.at(scale, row, np.abs(terms))
        np.add.at(activity, row, terms)
        excess = np.maximum(self.row_lower - activity, activity - self.row_upper)
        violated = np.flatnonzero(excess > _ROW_TOLERANCE * scale)
        return f"row {violated[0]} is missed by {excess[violated[0]]:g}" if len(violated) else ""


class Builder:
    """Builds a `Model` from variables and rows, which are added many at a time."""

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
        """Add `count` variables and return their indices. Each property is an array with one value
        per variable, or one value for all of them.
        """
        self._variables.append(
            tuple(_broadcast(each, count) for each in (cost, lower, upper, integral))
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
        """Add `count` rows, by default the largest entry of `row` plus 1.

        Entry i adds the term `values[i]` * variable `columns[i]` to the new row `row[i]`; the first
        new row is 0. Entries with equal row and variable add up. `lower` and `upper` are the bounds
        of the rows: one value per row, or one value for all of them.
        """
        rows = np.asarray(row, dtype=np.int64).ravel()
        variables = np.asarray(columns, dtype=np.int64).ravel()
        if count is None:
            count = int(rows.max(initial=-1)) + 1
        coefficients = _broadcast(values, len(variables))
        self._entries.append((rows + self._rows, variables, coefficients))
        self._bounds.append((_broadcast(lower, count), _broadcast(upper, count)))
        self._rows += count

    def model(self) -> Model:
        """Return the model. Raise AutopipeError if a row has a variable that does not exist, or if
        a cost or a coefficient is not finite.
        """
        from scipy.sparse import coo_array

        cost, lower, upper, integral = _concatenated(self._variables, 4)
        rows, columns, values = _concatenated(self._entries, 3)
        if not ((columns >= 0) & (columns < self._count)).all():
            raise AutopipeError(
                "a row of the integer program refers to a variable that does not exist"
            )
        if not np.isfinite(cost).all() or not np.isfinite(values).all():
            raise AutopipeError("a cost or coefficient of the integer program is infinite or NaN")
        positions = rows.astype(np.int64), columns.astype(np.int64)
        # HiGHS rejects a program with several entries of one row and variable. tocsr() adds them
        # up.
        matrix = coo_array((values, positions), shape=(self._rows, self._count)).tocsr()
        return Model(
            cost, lower, upper, integral.astype(bool), matrix, *_concatenated(self._bounds, 2)
        )


def _broadcast(values: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return `values`, one number or `count` numbers, as a new vector of `count` numbers."""
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (count,)).copy()


def _concatenated(
    parts: Sequence[tuple[NDArray[Any], ...]], width: int
) -> list[NDArray[np.float64]]:
    """Return `width` arrays. Array i is the concatenation of the arrays at position i of all tuples
    in `parts`.
    """
    return [
        np.concatenate([np.zeros(0), *(part[position] for part in parts)])
        for position in range(width)
    ]


_LARGEST_COST = 2.0**14
"""Approximate maximum to which the costs are scaled before a solver runs, because the tolerances of
solvers (about 1e-6) are absolute.
"""
_SAME = 1e-9
"""Relative difference between a cost and its bound up to which both count as equal."""


class Status(Enum):
    """Outcome of a solver: whether it found values, and what it proved."""

    OPTIMAL = "optimal"
    """The values are proven optimal within the requested gap."""
    FEASIBLE = "feasible"
    """Values were found, but they are not proven optimal."""
    INFEASIBLE = "infeasible"
    """It is proven that no values satisfy all constraints."""
    UNKNOWN = "unknown"
    """Neither values nor a proof were found within the limits."""

    @property
    def found(self) -> bool:
        """True if values were found."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, slots=True, eq=False)
class MilpResult:
    """Result of an integer program."""

    status: Status
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """One value per variable, checked against every row; empty if there are none."""
    objective: float = np.inf
    """Cost of the values; infinite if there are none."""
    bound: float = -np.inf
    """Lower bound of the cost, within the solver's tolerance; -infinity if unknown."""

    @property
    def found(self) -> bool:
        """True if the result contains values."""
        return self.status.found

    @property
    def proven(self) -> bool:
        """True if the values are optimal within the requested gap."""
        return self.status is Status.OPTIMAL

    @property
    def gap(self) -> float:
        """Maximum fraction of the cost by which the cost exceeds the minimum; infinite if there are
        no values or no bound.
        """
        if not self.found or self.bound == -np.inf:
            return np.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


_OPTIMAL = 0
_INFEASIBLE = 2
_UNBOUNDED = 3
_OTHER = 4
"""The last of four status codes of `scipy.optimize.milp`. It stands for results that the other
codes do not describe, for example numerical difficulties.
"""
_NO_MINIMUM = "the objective of the integer program has no minimum: some variable lacks a bound"


def solve_with_highs(
    model: Model, seconds: float, gap: float, nodes: int | None, presolve: bool
) -> MilpResult | None:
    """Return the unchecked result of HiGHS on one thread, within `seconds` and, unless it is None,
    `nodes` search nodes. The search ends when the relative gap is at most `gap`.

    None if HiGHS runs with presolve and cannot classify its result. Start values do not exist,
    because HiGHS in scipy does not accept any. Raise AutopipeError for a model that HiGHS rejects,
    and for an objective without a minimum.
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
        raise AutopipeError(_NO_MINIMUM)
    if found.status == _INFEASIBLE:
        # scipy returns one code for infeasible models and for models that HiGHS rejects. Only the
        # message distinguishes both cases.
        if "infeasible" not in found.message.lower():
            raise AutopipeError(f"HiGHS rejects the integer program: {found.message}")
        return MilpResult(Status.INFEASIBLE)
    bound = (
        found.fun
        if found.mip_dual_bound is None and found.status == _OPTIMAL
        else found.mip_dual_bound
    )
    result = MilpResult(Status.UNKNOWN, bound=-np.inf if bound is None else float(bound))
    return result if found.x is None else replace(result, status=Status.FEASIBLE, values=found.x)


def _solve_with_pulp(
    model: Model, solver: str, seconds: float, gap: float, nodes: int | None, presolve: bool
) -> MilpResult | None:
    """Return the unchecked result of `solver` through PuLP, or None if the solver reports neither
    values nor a proof that there are none. The limits are those of `solve_with_highs`.

    PuLP returns no bound. If the solver states that its values are optimal within the relative
    `gap`, the bound is their objective minus this gap; otherwise it is -infinity. Some solvers are
    executables that write values with few digits, so a value close to an integer is rounded to this
    integer. If that makes the values invalid, `solve` rejects them.

    Raise ConfigurationError if the solver is not installed or fails, and AutopipeError if the
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
    result = solve_with_pulp(program, solver, seconds, gap, nodes, presolve)
    if result.values is not None:
        integers = np.rint(result.values)
        values = np.where(
            np.abs(result.values - integers) <= _TEXT_TOLERANCE, integers, result.values
        )
        objective = model.objective(values)
        bound = objective - gap * abs(objective) if result.is_optimal else -np.inf
        return MilpResult(Status.FEASIBLE, values, bound=bound)
    may_decrease = ((model.cost < 0) & np.isposinf(model.upper)) | (
        (model.cost > 0) & np.isneginf(model.lower)
    )
    if result.status == "Infeasible" and may_decrease.any():
        # The status "Infeasible" can also mean that values exist and that the objective lacks a
        # minimum, because PuLP's interfaces differ. A run without costs distinguishes both cases.
        rows = replace(model, cost=np.zeros_like(model.cost))
        without_costs = _solve_with_pulp(rows, solver, seconds, gap, nodes, presolve)
        if without_costs is not None and without_costs.found:
            result = replace(result, status="Unbounded")
    if result.status == "Infeasible":
        return MilpResult(Status.INFEASIBLE)
    if result.status == "Unbounded":
        raise AutopipeError(_NO_MINIMUM)
    return None


def solve(
    model: Model,
    time_limit: float,
    gap: float = 0.0,
    start: NDArray[np.float64] | None = None,
    nodes: int | None = None,
    solver: str = AUTO,
) -> MilpResult:
    """Return the values with the minimum cost, or the best values found within `time_limit` seconds
    and, unless it is None, `nodes` search nodes.

    Values count as optimal if the difference of their cost and its lower bound is at most the
    fraction `gap` of their cost. If the values `start` are given, the result is at least as good as
    they are. `solver` is `auto` (HiGHS inside scipy) or another name of `pulp_client.SOLVER_NAMES`.
    Solvers that accept a number of threads use one thread, so that equal programs have equal
    results unless the time limit ends a run.

    Raise AutopipeError if `start` violates a constraint, if the objective has no minimum, if HiGHS
    rejects the program, or if the process of PuLP fails. Raise ConfigurationError if the solver is
    not installed or reports an error.
    """
    best = MilpResult(Status.UNKNOWN)
    if start is not None:
        if violation := model.violation(start):
            raise AutopipeError(f"the start values of the integer program are invalid: {violation}")
        best = MilpResult(Status.FEASIBLE, start, model.objective(start))
    if not model.variables:
        return _rounded_and_checked(
            model, MilpResult(Status.FEASIBLE, bound=0.0), gap
        ) or MilpResult(Status.INFEASIBLE)
    end = time.monotonic() + time_limit
    scale = float(2.0 ** np.floor(np.log2(_LARGEST_COST / (np.abs(model.cost).max() or 1.0))))
    scaled = replace(model, cost=model.cost * scale)
    # Presolve makes a solver faster, but HiGHS sometimes cannot distinguish an infeasible program
    # from a program without a minimum, or returns invalid values. If the first run returns no valid
    # result, repeat it without presolve.
    for presolve in (True, False):
        left_s = end - time.monotonic()
        unchecked = None
        if left_s > 0 and solver == AUTO:
            unchecked = solve_with_highs(scaled, left_s, gap, nodes, presolve)
        elif left_s > 0:
            unchecked = _solve_with_pulp(scaled, solver, left_s, gap, nodes, presolve)
        result = None
        if unchecked:
            result = _rounded_and_checked(
                model, replace(unchecked, bound=unchecked.bound / scale), gap
            )
        if result is None or (result.status is Status.INFEASIBLE and best.found):
            continue
        if best.found and best.objective <= result.objective:
            return _with_status(replace(best, bound=result.bound), gap)
        return result
    return best


def _rounded_and_checked(model: Model, result: MilpResult, gap: float) -> MilpResult | None:
    """Return the result with valid values, their cost and their status, or None if its values
    violate a constraint. Values are first rounded to integers and clipped to their bounds. A result
    without values is returned unchanged.
    """
    if not result.found:
        return result
    # Solvers return integer variables with a tolerance, but the check requires exact integers.
    integers = np.rint(result.values)
    is_close = np.abs(result.values - integers) <= _INTEGRALITY_TOLERANCE
    rounded = np.where(model.integral & is_close, integers, result.values)
    values = np.clip(rounded, model.lower, model.upper)
    if model.violation(values):
        return None
    objective = model.objective(values)
    return _with_status(MilpResult(Status.FEASIBLE, values, objective, result.bound), gap)


def _with_status(result: MilpResult, gap: float) -> MilpResult:
    """Return the result with status OPTIMAL if its cost is proven to be within the fraction `gap`
    of the minimum, and otherwise with status FEASIBLE.
    """
    if result.objective - result.bound <= _SAME * abs(result.objective) + 1e-300:
        result = replace(result, bound=result.objective)
    return replace(result, status=Status.OPTIMAL if result.gap <= gap else Status.FEASIBLE)
