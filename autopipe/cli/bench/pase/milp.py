"""The same search as an integer program, for comparison: one variable a configuration and one a pair on an edge."""

from __future__ import annotations

import numpy as np

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
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    simple = merged(model)
    sizes = [len(costs) for costs in simple.costs]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    costs = [np.concatenate(simple.costs).astype(float)]
    rows = [np.repeat(np.arange(len(sizes)), sizes)]
    columns, values = [np.arange(starts[-1])], [np.ones(starts[-1])]
    row, column = len(sizes), int(starts[-1])
    for edge in simple.edges:
        places = column + np.arange(edge.costs.size).reshape(edge.costs.shape)
        for node, axis in ((edge.source, 0), (edge.target, 1)):
            own = np.arange(sizes[node])
            rows += [row + np.moveaxis(np.indices(places.shape), 0, -1)[..., axis].ravel(), row + own]
            columns += [places.ravel(), starts[node] + own]
            values += [np.ones(places.size), -np.ones(sizes[node])]
            row += sizes[node]
        costs.append(edge.costs.ravel().astype(float))
        column += edge.costs.size
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(row, column))
    right = np.concatenate((np.ones(len(sizes)), np.zeros(row - len(sizes))))
    scale = max(float(vector.max()) for vector in costs) or 1.0
    integral = np.concatenate((np.ones(starts[-1]), np.zeros(column - starts[-1])))
    found = milp(
        np.concatenate(costs) / scale,
        integrality=integral,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix.tocsr(), right, right),
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    return (float(found.fun) * scale, found.status == 0) if found.fun is not None else (float("inf"), False)
