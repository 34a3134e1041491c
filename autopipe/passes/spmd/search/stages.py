"""Stages whose nodes, devices and micro-batches are settled: the splits inside each of them, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.placement import Placement, SplitProof, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.stage_nodes import StageNodes, assign_nodes
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory_check import in_flight
from autopipe.passes.spmd.search.configurations import Splits
from autopipe.passes.spmd.search.fitting import FittedPlacement, Solver, fit_stage, or_by_samples
from autopipe.passes.spmd.search.ground import StageOptions
from autopipe.passes.spmd.search.tables import make_tables


@dataclass(frozen=True, slots=True)
class SplitProblem:
    """Nodes and options of each stage of a placement, for the search for its splits."""

    problem: Problem
    plans: tuple[StageNodes, ...]
    terms: tuple[StageOptions, ...]

    def split(
        self, placement: Placement, index: int, solver: Solver, overlap: bool = False, own: Problem | None = None
    ) -> FittedPlacement:
        """`placement` with stage `index` split as `solver` finds it best, or by its samples where that is faster.

        `overlap` says whether `solver` counts the exchange of gradients as hidden by the last micro-batch's backward;
        `own` is the problem on the stage's micro-batches, where that is known. Raises InfeasibleError, with the least
        excess, where nothing fits into memory, and what `solver` raises.
        """
        stage, terms = placement.stages[index], self.terms[index]
        own = own or resized(self.problem, stage.micro_batch_size)
        tables = make_tables(own, [node for node, _ in self.plans[index].nodes], stage.devices, terms)
        best = fit_stage(self.problem, placement, index, tables, solver, overlap)
        if any(node in terms.allowed for node in stage.nodes):
            return best
        return or_by_samples(self.problem, own.graph, best, index, overlap)


def split_problem(problem: Problem, placement: Placement, fixed: Mapping[int, Splits]) -> SplitProblem:
    """The insides of `placement`'s stages, with the splits of `fixed` nodes as they are there."""
    wanted = (problem.loss,) if problem.train and problem.loss is not None else problem.graph.outputs
    plans = assign_nodes(problem.graph, placement, wanted)
    return SplitProblem(problem, plans, _terms(problem, placement, plans, fixed))


def split_stages(
    problem: Problem, placement: Placement, fixed: Mapping[int, Splits], solver: Solver, overlap: bool = False
) -> Placement:
    """`placement` with every stage split so, and what is proven of that.

    Raises InfeasibleError where memory does not hold any placement, with the least excess, and what `solver` raises.
    """
    inside = split_problem(problem, placement, fixed)
    proofs = []
    for index in range(len(placement.stages)):
        best = inside.split(placement, index, solver, overlap)
        placement = best.placement
        proofs.append(best.proof)
    return replace(placement, proof=_together(proofs))


def _terms(
    problem: Problem, placement: Placement, plans: Sequence[StageNodes], fixed: Mapping[int, Splits]
) -> tuple[StageOptions, ...]:
    graph = problem.graph
    computed = [{node for node, _ in plan.nodes} for plan in plans]
    whole: Splits = ()
    # What several stages compute for themselves is cheap; splits of one group mean nothing on another.
    shared = {node: (whole,) for node in recomputed_nodes(graph) if sum(node in each for each in computed) > 1}
    read = [{name for node in each for name in graph.nodes[node].inputs if graph.parameter(name)} for each in computed]
    torn = frozenset(name for names in read for name in names if sum(name in each for each in read) > 1)
    return tuple(
        StageOptions(
            allowed={**shared, **{node: (splits,) for node, splits in fixed.items()}},
            given=frozenset(plan.outputs),
            whole=torn,
            in_flight=kept,
            recompute=stage.recompute,
        )
        for stage, plan, kept in zip(placement.stages, plans, in_flight(problem, placement), strict=True)
    )


def _together(proofs: Sequence[SplitProof]) -> SplitProof:
    """The proof of all stages: what they cost together."""
    cost, bound = (sum(figures) for figures in zip(*((each.cost, each.lower_bound) for each in proofs), strict=True))
    return SplitProof(cost, bound, all(each.optimal for each in proofs))
