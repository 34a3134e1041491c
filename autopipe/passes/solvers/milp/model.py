"""An integer linear program: minimise cost · x under bounds on x and on each row of a sparse matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopipe.ir.errors import AutopipeError

_INTEGRAL = 1e-5
"""How far from a whole number a solver may leave a variable that is one."""
_FEASIBLE = 1e-6
"""How far a row may be missed, of the largest term in it (or of 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Minimise `cost · x` under `lower <= x <= upper` and `row_lower <= A x <= row_upper`.

    `cost`, `lower`, `upper` and `integral` (is x to be a whole number?) have an entry a variable. Row r of A has the
    coefficients `values[starts[r] : starts[r + 1]]` at the variables `columns[...]` of the same places.
    """

    cost: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    integral: NDArray[np.bool_]
    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]

    @property
    def variables(self) -> int:
        """Number of variables."""
        return len(self.cost)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_lower)

    def objective(self, x: NDArray[np.float64]) -> float:
        """Cost of `x`."""
        return float(self.cost @ x)

    def row_of(self) -> NDArray[np.int64]:
        """For each entry of A its row."""
        return np.repeat(np.arange(self.rows), np.diff(self.starts))

    def activity(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """A x."""
        found: NDArray[np.float64] = np.zeros(self.rows)
        np.add.at(found, self.row_of(), self.values * x[self.columns])
        return found

    def settled(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """`x` with whole numbers made exactly whole, and within the variables' bounds."""
        close = self.integral & (np.abs(x - np.rint(x)) <= _INTEGRAL)
        return np.clip(np.where(close, np.rint(x), x), self.lower, self.upper)

    def violation(self, x: NDArray[np.float64]) -> str:
        """The first row that `x` violates, in words; "" if none but by rounding errors."""
        if x.shape != (self.variables,) or not np.isfinite(x).all():
            return f"{self.variables} finite numbers are needed"
        broken = np.flatnonzero(self.integral & (x != np.rint(x)))
        if len(broken):
            return f"variable {broken[0]} is {x[broken[0]]:g}, not a whole number"
        broken = np.flatnonzero((x < self.lower) | (x > self.upper))
        if len(broken):
            return f"variable {broken[0]} is {x[broken[0]]:g}, out of its bounds"
        scale = np.ones(self.rows)
        np.maximum.at(scale, self.row_of(), np.abs(self.values * x[self.columns]))
        done = self.activity(x)
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
        """The numbers of `count` new variables; what is said of them is one figure each, or one for all."""
        self._variables.append(tuple(_filled(each, count) for each in (cost, lower, upper, integral)))
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
        """`count` new rows (the largest of `row` and one, if not given): entry i of `row` counts them from 0 on and
        takes `columns[i]` times `values[i]`. An entry given twice counts twice."""
        places = np.asarray(row, dtype=np.int64).ravel()
        wide = np.asarray(columns, dtype=np.int64).ravel()
        if count is None:
            count = int(places.max(initial=-1)) + 1
        self._entries.append((places + self._rows, wide, _filled(values, len(wide))))
        self._bounds.append((_filled(lower, count), _filled(upper, count)))
        self._rows += count

    def model(self) -> Model:
        """The model as collected.

        Raises AutopipeError for a row that names no variable of it, or figures that are none.
        """
        cost, lower, upper, integral = _joined(self._variables, 4)
        rows, variables, values = _joined(self._entries, 3)
        row_lower, row_upper = _joined(self._bounds, 2)
        if not ((variables >= 0) & (variables < self._count)).all():
            raise AutopipeError("a row of the integer program names a variable that it has not")
        if not np.isfinite(cost).all() or not np.isfinite(values).all():
            raise AutopipeError("the integer program has costs or coefficients that are no finite numbers")
        # One entry for a row and a variable: HiGHS refuses a program that has two.
        width = max(self._count, 1)
        places, entry = np.unique((rows * width + variables).astype(np.int64), return_inverse=True)
        sums = np.zeros(len(places))
        np.add.at(sums, entry, values)
        row, columns = np.divmod(places, width)
        starts = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=self._rows))))
        return Model(
            cost,
            lower,
            upper,
            integral.astype(bool),
            starts.astype(np.int64),
            columns,
            sums,
            row_lower,
            row_upper,
        )


def _filled(figures: ArrayLike, count: int) -> NDArray[np.float64]:
    return np.broadcast_to(np.asarray(figures, dtype=np.float64), (count,)).copy()


def _joined(parts: Sequence[tuple[NDArray[Any], ...]], width: int) -> list[NDArray[np.float64]]:
    """The parts' arrays, one after the other, by their place in the tuples."""
    return [np.concatenate([np.zeros(0), *(part[place] for part in parts)]) for place in range(width)]
