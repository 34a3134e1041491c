"""The default solver: the least cost, or the least within a memory limit."""

from __future__ import annotations

from autopipe.passes.solvers.min_sum.answer import Assignment, counted
from autopipe.passes.solvers.min_sum.budget import PATIENCE_S, Budget
from autopipe.passes.solvers.min_sum.limited import solve_within
from autopipe.passes.solvers.min_sum.model import MinSum, Number, merged
from autopipe.passes.solvers.min_sum.unlimited import solve_unlimited


def solve(
    model: MinSum,
    memory_limit: Number | None = None,
    time_limit: float | None = None,
    patience: float = PATIENCE_S,
) -> Assignment:
    """The best choice whose memory is within the limit (bytes), within `time_limit` seconds.

    Work is counted, not time: the clock only ends a search that a slow machine cannot do in its limit. Without a limit,
    the work of `patience` seconds is done at most. A result without proof is returned with its bound. Raises
    InfeasibleError where every choice is forbidden.
    """
    budget = Budget(time_limit, patience)
    simple = merged(model)
    answer = solve_unlimited(simple, budget)
    if memory_limit is not None and answer.memory > memory_limit:
        answer = solve_within(simple, memory_limit, answer, budget)
    return counted(answer, model)
