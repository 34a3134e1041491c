"""The same search as an integer program, for comparison: one variable a configuration and one a pair on an edge."""

from __future__ import annotations

import numpy as np

from autopipe.passes.solvers.milp import Builder, solve
from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.model import merged


def pairs(model: MinSum) -> int:
    """How many variables stand for pairs of configurations."""
    return sum(edge.costs.size for edge in merged(model).edges)


def least_by_milp(model: MinSum, time_limit: float) -> tuple[float, bool]:
    """The least cost that HiGHS finds in `time_limit` seconds, and whether it proves it.

    Each node chooses one configuration; the pairs of an edge add up, along either side, to what its nodes choose
    (the local polytope: Schlesinger, 1976).
    """
    simple = merged(model)
    sizes = [len(costs) for costs in simple.costs]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    builder = Builder()
    chosen = builder.add_variables(int(starts[-1]), np.concatenate(simple.costs).astype(float))
    builder.add_rows(np.repeat(np.arange(len(sizes)), sizes), chosen, lower=1, upper=1)
    for edge in simple.edges:
        both = builder.add_variables(edge.costs.size, edge.costs.ravel().astype(float), integral=False)
        places = both.reshape(edge.costs.shape)
        for node, other in ((edge.source, places), (edge.target, places.T)):
            own = np.arange(sizes[node])
            row = np.concatenate((np.repeat(own, other.size // len(own)), own))
            columns = np.concatenate((other.ravel(), starts[node] + own))
            values = np.concatenate((np.ones(other.size), -np.ones(sizes[node])))
            builder.add_rows(row, columns, values, lower=0, upper=0)
    answer = solve(builder.model(), time_limit, solver="highs")
    return answer.objective, answer.proven
