"""Cones: a root, and the non-roots whose results only it and they read.

Roots are operators with several users, tails, operators of several operands, and heavy computation; so is a value that
several operators read. All others have one operand at most and one user: together with the operand's root they are a
line. (TePDist, "SPMD Strategy: Cone Structure".)
"""

from __future__ import annotations

import numpy as np

from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.model import Array


def least_costs(model: MinSum) -> Array:
    """Least cost of each variable; inf where every configuration is forbidden."""
    known = {id(costs): float(costs.min()) for costs in model.costs}
    return np.array([known[id(costs)] for costs in model.costs])


def is_heavy(model: MinSum) -> Array:
    """True if a variable takes more than all of them do on average, of [variables]."""
    least = least_costs(model)
    heavy: Array = least > least.mean()
    return heavy


def is_root(model: MinSum) -> Array:
    """True if a variable is the root of a cone, of [variables]. Edges lead from operands to users."""
    users, operands = (np.zeros(len(model.costs), dtype=np.int64) for _ in range(2))
    for edge in model.edges:
        users[edge.source] += 1
        operands[edge.target] += 1
    roots: Array = (users != 1) | (operands > 1) | is_heavy(model)
    return roots
