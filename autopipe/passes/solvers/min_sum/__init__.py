"""Pairwise min-sum models and their exact solvers, in numpy alone.

    model = MinSum(
        costs=(vector, ...),                        # a node: what each of its configurations costs
        edges=(Edge(0, 1, matrix, memory), ...),    # what pairs of choices cost (and need, or None)
        memory=(vector, ...),                       # a node: bytes of each configuration, or None altogether
    )
    answer = solve(model, memory_limit=bytes, time_limit=seconds)
    answer = eliminate(model, ordering="generate_seq")       # or breadth_first, min_fill; no memory limit
    answer.choice, answer.cost, answer.bound, answer.proven, answer.gap, answer.memory, answer.fits

Costs are int64 or float64 arrays; integers give an int as cost, exactly (so does float64 below
2^53, and is faster); `np.inf` forbids. Give repeated layers the same array objects: equal work is
then done once. Where no choice fits the memory, the answer is the one of least memory and `fits` is
false; `proven` says whether less is impossible. Where none was found in time, the cost is inf. It
imports numpy and `ir/errors` alone.
"""

from __future__ import annotations

from autopipe.passes.solvers.min_sum.branch_and_bound import ReducedStart
from autopipe.passes.solvers.min_sum.elimination import TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.memory_limit import solve_within
from autopipe.passes.solvers.min_sum.model import (
    PATIENCE_S,
    Assignment,
    Budget,
    Edge,
    MinSum,
    Number,
    counted,
    merged,
)

__all__ = ["Assignment", "Edge", "MinSum", "TableTooLargeError", "eliminate", "solve"]


def solve(
    model: MinSum,
    memory_limit: Number | None = None,
    time_limit: float | None = None,
    patience: float = PATIENCE_S,
) -> Assignment:
    """The best choice whose memory is within the limit (bytes), within `time_limit` seconds. Work
    is counted, not time: the clock only ends a search that a slow machine cannot do in its limit.
    Without a limit, the work of `patience` seconds is done at most. A result without proof is
    returned with its bound. Raises InfeasibleError where every choice is forbidden.
    """
    budget = Budget(time_limit, patience)
    simple = merged(model)
    answer = ReducedStart(simple, budget).solve(budget)
    if memory_limit is not None and answer.memory > memory_limit:
        answer = solve_within(simple, memory_limit, answer, budget)
    return counted(answer, model)
