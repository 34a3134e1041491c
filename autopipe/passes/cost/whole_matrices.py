"""Optimizers that need a matrix on one device, and placements that cut it."""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.optimized import matrices
from autopipe.passes.cost.stage_work import stage_work


def check_whole_matrices(problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError where the optimizer needs matrices that a stage cuts."""
    if problem.optimizer.name != "muon" or not problem.train:
        return
    own = matrices(problem.graph)
    for number, work in enumerate(stage_work(problem, placement)):
        for name, parts in work.parameter_parts:
            if name in own and parts > 1:
                message = f"optimizer muon needs whole matrices, and stage {number} cuts {name!r} in {parts} parts"
                raise InfeasibleError(message, hint="pipelines and data parallelism leave them whole")
