"""HiGHS as scipy has it inside, which gets along with OR-tools in one process (the package highspy does not)."""

from __future__ import annotations

import numpy as np

from autopipe.ir.errors import AutopipeError
from autopipe.passes.solvers.milp.claim import Limits, SolverReport
from autopipe.passes.solvers.milp.model import Model

_OPTIMAL, _INFEASIBLE, _UNBOUNDED, _OTHER = 0, 2, 3, 4
"""Codes of `scipy.optimize.milp`."""


def by_highs(model: Model, limits: Limits) -> SolverReport:
    """Run HiGHS on one thread; it takes no values to start from, and its seed is its own.

    Raises AutopipeError for a model that HiGHS does not accept.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    matrix = csr_array((model.values, model.columns, model.starts), shape=(model.rows, model.variables))
    options: dict[str, float | bool] = {"time_limit": limits.seconds, "mip_rel_gap": limits.gap}
    if limits.nodes is not None:
        options["node_limit"] = limits.nodes
    for presolve in (True, False):
        found = milp(
            model.cost,
            integrality=model.integral.astype(np.int64),
            bounds=Bounds(model.lower, model.upper),
            constraints=LinearConstraint(matrix, model.row_lower, model.row_upper) if model.rows else None,
            options={**options, "presolve": presolve},
        )
        # Presolve alone cannot always say whether a program has no values or no least one.
        if found.status != _OTHER:
            break
    # One code stands for no values and for a model that is refused.
    if found.status == _INFEASIBLE and "infeasible" not in found.message.lower():
        raise AutopipeError(f"HiGHS does not accept the integer program: {found.message}")
    bound = found.mip_dual_bound
    if bound is None and found.status == _OPTIMAL:
        bound = found.fun
    return SolverReport(
        found.x, -np.inf if bound is None else float(bound), found.status == _INFEASIBLE, found.status == _UNBOUNDED
    )
