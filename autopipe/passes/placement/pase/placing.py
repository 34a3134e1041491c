"""From a problem to a placement: the splits of each stage in turn, whichever search answers the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.problem import Problem
from autopipe.passes.cost.fit import fitted, out_of_memory
from autopipe.passes.cost.memory import state_of
from autopipe.passes.placement.pase.skeleton import skeleton_of
from autopipe.passes.spmd.search.fitting import Solver, fit_stage, or_by_samples
from autopipe.passes.spmd.search.tables import make_tables


def in_stages(problem: Problem, count: int, solver: Solver, overlap: bool = False) -> Placement:
    """The model in `count` stages, each split as `solver` answers, with what is proven of that.

    `overlap` says whether `solver` counts the exchange of gradients as hidden by the last micro-batch's backward.

    Raises ConfigurationError naming constraints that contradict one another or cannot be followed, InfeasibleError
    where memory does not hold any placement, with the least excess, and what `solver` raises.
    """
    _check_memory(problem, count)
    skeleton = skeleton_of(problem, count)
    placement = skeleton.placement
    proofs = []
    for index, (plan, terms) in enumerate(zip(skeleton.plans, skeleton.terms, strict=True)):
        nodes = [node for node, _ in plan.nodes]
        tables = make_tables(problem, nodes, placement.stages[index].devices, terms)
        best = fit_stage(problem, placement, index, tables, solver, overlap)
        if not any(node in terms.allowed for node in placement.stages[index].nodes):
            best = or_by_samples(problem, best, index, overlap)
        placement = best.placement
        proofs.append(best.proof)
    return replace(fitted(problem, placement), proof=_together(proofs))


def _check_memory(problem: Problem, count: int) -> None:
    """Raise InfeasibleError where not even equal shares of what must be kept fit: no search is needed to tell.

    Several stages may drop what they keep and compute it again, one stage needs all of it at once in any case.
    """
    parameters = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters)).total
    kept = sum(each.kept_bytes for each in problem.work) if problem.train and count == 1 else 0
    least = (parameters + kept) // problem.cluster.size
    most = max(range(problem.cluster.size), key=problem.memory_of)
    if least > problem.memory_of(most):
        raise out_of_memory(problem, list(range(count)), count, most, least, least=True)


def _together(proofs: Sequence[SplitProof]) -> SplitProof:
    """The proof of all stages: what they cost together."""
    cost, bound = (sum(figures) for figures in zip(*((each.cost, each.lower_bound) for each in proofs), strict=True))
    return SplitProof(cost, bound, all(each.optimal for each in proofs))
