"""Unchecked result of a solver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SolverReport:
    """The end of a run as the solver tells it."""

    values: NDArray[np.float64] | None = None
    """One figure a variable, as the solver left them; None where it has none."""
    bound: float = -np.inf
    """No values cost less."""
    infeasible: bool = False
    """There are no values."""
    unbounded: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run may end without a proof, and what counts as one."""

    seconds: float
    """Of the clock."""
    nodes: int | None = None
    """Of the search tree; the same answer on every machine that is fast enough."""
    gap: float = 0.0
    """A cost is least enough that is at most this share above the bound."""
    seed: int = 0
