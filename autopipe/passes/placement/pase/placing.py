"""From a problem to a placement: the splits of each stage in turn, whichever search answers the tables."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import check_kinds, fitted, out_of_memory
from autopipe.passes.placement.pase.skeleton import skeleton_of
from autopipe.passes.sharding.search import Solver, split_stages


def in_stages(problem: Problem, count: int, solver: Solver, overlap: bool = False) -> Placement:
    """The model in `count` stages, each split as `solver` answers, with what is proven of that.

    `overlap` says whether `solver` counts the exchange of gradients as hidden by the last micro-batch's backward.

    Raises ConfigurationError naming constraints that contradict one another or cannot be followed, InfeasibleError
    where memory does not hold any placement, with the least excess, and what `solver` raises.
    """
    _check_memory(problem, count)
    skeleton = skeleton_of(problem, count)
    check_kinds(problem, skeleton.placement)
    found = split_stages(problem, skeleton.placement, skeleton.wished, solver, overlap)
    return replace(fitted(problem, found), proof=found.proof)


def _check_memory(problem: Problem, count: int) -> None:
    """Raise InfeasibleError where not even equal shares of what must be kept fit: no search is needed to tell.

    Of what one stage keeps the search for splits counts all, recomputed or not.
    """
    parameters = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters)).total
    kept = sum(each.kept_bytes for each in problem.work) if problem.train and count == 1 else 0
    least = (parameters + kept) // problem.cluster.size
    most = max(range(problem.cluster.size), key=problem.memory_of)
    if least > problem.memory_of(most):
        raise out_of_memory(problem, list(range(count)), count, most, least, least=True)
