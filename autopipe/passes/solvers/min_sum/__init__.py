"""Pairwise min-sum models and their exact solvers, in numpy alone.

    model = MinSum(
        costs=(vector, ...),                        # a node: what each of its configurations costs
        edges=(Edge(0, 1, matrix, memory), ...),    # what pairs of choices cost (and need, or None)
        memory=(vector, ...),                       # a node: bytes of each configuration, or None altogether
    )
    answer = solve(model, memory_limit=bytes, time_limit=seconds)
    answer = eliminate(model, ordering="generate_seq")       # or breadth_first, min_fill; no memory limit
    answer.choice, answer.cost, answer.bound, answer.proven, answer.gap, answer.memory, answer.fits

- Costs are int64 or float64 arrays. Integer arrays give an int as cost, exactly. Whole numbers in float64 stay exact
  below 2^53, and are faster. `np.inf` in float64 forbids a configuration or a pair.
- Give repeated layers the same array objects: nothing is copied for an edge, and equal work is done once.
- `solve` goes on until its answer is proven, or the work of `time_limit` seconds (of a minute, where none is given) is
  done. Then it returns the best choice found and `bound`, the least that any choice can cost. Where no choice fits the
  memory, the answer is the one of least memory and `fits` is false; `proven` says whether less is impossible. Where
  every choice is forbidden, InfeasibleError is raised; where none was found in time, the cost is inf.
- `eliminate` refuses, with TableTooLargeError, what would need too much memory.

It imports numpy and `ir/errors` alone.
"""

from __future__ import annotations

from autopipe.passes.solvers.min_sum.branch_and_bound import ReducedStart
from autopipe.passes.solvers.min_sum.elimination import TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.memory_limit import solve_within
from autopipe.passes.solvers.min_sum.model import PATIENCE_S, Assignment, Budget, Edge, MinSum, Number, counted, merged

__all__ = ["Assignment", "Edge", "MinSum", "TableTooLargeError", "eliminate", "solve"]


def solve(
    model: MinSum,
    memory_limit: Number | None = None,
    time_limit: float | None = None,
    patience: float = PATIENCE_S,
) -> Assignment:
    """The best choice whose memory is within the limit (bytes), within `time_limit` seconds. Work is counted, not time:
    the clock only ends a search that a slow machine cannot do in its limit. Without a limit, the work of `patience`
    seconds is done at most. A result without proof is returned with its bound. Raises InfeasibleError where every
    choice is forbidden."""
    budget = Budget(time_limit, patience)
    simple = merged(model)
    answer = ReducedStart(simple, budget).solve(budget)
    if memory_limit is not None and answer.memory > memory_limit:
        answer = solve_within(simple, memory_limit, answer, budget)
    return counted(answer, model)
