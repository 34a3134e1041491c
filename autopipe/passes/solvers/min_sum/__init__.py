"""Pairwise min-sum models and exact solvers, with numpy only. In such a model, each node chooses
one configuration, and the sum of the costs of nodes and of pairs of nodes is minimised.

    model = MinSum(
        costs=(vector, ...),                       # per node: cost of each configuration
        edges=(Edge(0, 1, matrix, memory), ...),   # cost (and bytes, or None) of pairs of choices
        memory=(vector, ...),                      # per node: bytes of each configuration; or None
    )
    result = solve(model, memory_limit=bytes, time_limit=seconds)
    result = eliminate(model, ordering="min_fill")       # no memory limit
    result.choice, result.cost, result.bound, result.proven, result.gap, result.memory, result.fits

Costs are int64 or float64 arrays. Integers give an exact int as cost; float64 is exact below 2^53
and faster. `np.inf` forbids a configuration or a pair. Use one array object for repeated layers:
equal work is then done once.

If no choice fits in memory, the result is the choice with the smallest memory that was found, and
`fits` is False; `proven` is then True if no choice needs less memory. If the time limit ends the
search before it finds a choice without a forbidden configuration or pair, the cost is inf.
"""

from __future__ import annotations

from autopipe.passes.solvers.min_sum.branch_and_bound import ReducedStart
from autopipe.passes.solvers.min_sum.elimination import TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.memory_limit import solve_within_limit
from autopipe.passes.solvers.min_sum.model import (
    DEFAULT_WORK_S,
    Assignment,
    Budget,
    Edge,
    MinSum,
    Number,
    merge_edges,
    with_recomputed_cost,
)

__all__ = ["Assignment", "Edge", "MinSum", "TableTooLargeError", "eliminate", "solve"]


def solve(
    model: MinSum,
    memory_limit: Number | None = None,
    time_limit: float | None = None,
    patience: float = DEFAULT_WORK_S,
) -> Assignment:
    """Return the cheapest choice whose memory is at most `memory_limit` bytes; None is no limit. If
    no choice fits, return the choice with the smallest memory.

    The budget of the search is an amount of work, so that equal models have equal results: the work
    that a machine is assumed to do in `time_limit` seconds or, without a time limit, in `patience`
    seconds. If the machine is slower, the clock ends the search after `time_limit` seconds. If the
    budget does not suffice for a proof, the result is the best choice found, with the best lower
    bound found. Raise InfeasibleError if every choice is forbidden.
    """
    budget = Budget(time_limit, patience)
    simple = merge_edges(model)
    result = ReducedStart(simple, budget).solve(budget)
    if memory_limit is not None and result.memory > memory_limit:
        result = solve_within_limit(simple, memory_limit, result, budget)
    return with_recomputed_cost(result, model)
