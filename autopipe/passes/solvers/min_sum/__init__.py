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
"""

from autopipe.passes.solvers.min_sum.answer import Assignment
from autopipe.passes.solvers.min_sum.elimination import TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.model import Edge, MinSum
from autopipe.passes.solvers.min_sum.solve import solve

__all__ = ["Assignment", "Edge", "MinSum", "TableTooLargeError", "eliminate", "solve"]
