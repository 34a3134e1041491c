"""TePDist: the strategy, its options, and the notes of its outer search (Alibaba PAI, "TePDist", 2023)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import required_sizes, resolved_constraints
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_operators
from autopipe.passes.placement.tepdist.levels import LEVELS, LevelName
from autopipe.passes.placement.tepdist.search import MeshTrial, Outer, constrained_meshes, meshes
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.regions import check_constraints_met


def search_notes(outer: Outer, best: MeshTrial) -> tuple[str, ...]:
    """A line a factorisation, the best first: its step, or what speaks against it."""
    by_mesh: dict[str, list[MeshTrial]] = {}
    for each in sorted(outer.trials, key=lambda each: each.step_s):
        by_mesh.setdefault(each.mesh.name, []).append(each)
    notes = tuple(f"{name}: {_told(trials, best)}" for name, trials in by_mesh.items())
    reason = outer.undivided.get(best.mesh.name)
    return (*notes, f"the operators were divided in one line: {reason}") if reason else notes


def _told(trials: list[MeshTrial], best: MeshTrial) -> str:
    """The fastest trial of a factorisation, the first of them, or why it has none."""
    fastest = trials[0]
    step = f"{_ms(fastest.step_s)} with {fastest.micro_batches} micro-batch{'es' * (fastest.micro_batches > 1)}"
    if fastest is best:
        return f"{step}, the best of {len(trials)} tried"
    if math.isfinite(fastest.step_s):
        return f"{step}, {fastest.step_s / best.step_s:.2f} times that"
    beaten = [each for each in trials if each.least_s]
    if beaten:
        why = ", left out as time was up" if any(each.late for each in beaten) else ""
        return f"{_ms(min(each.least_s for each in beaten))} at least{why}"
    return str(next(each.refused for each in trials if each.refused)).partition("\n")[0]


def _ms(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True, slots=True)
class TePDist:
    """Tries every way to share the devices among stages and the mesh of each, and splits every operator inside.

    The number of micro-batches is chosen, too, where it is open. What is best is what a step under 1F1B, as it is
    simulated, takes least with.
    """

    level: LevelName = "O2"
    """How splits are searched inside a stage. `O2`: segments between critical operators, then the whole stage by
    dynamic programming. `O3`: all cones in one integer programme. `O4`: all operators in one."""
    stages: int | None = None
    """Pipeline stages, of equal groups of devices; all numbers that divide the devices are tried where it is open."""
    unbalance: float = 0.08
    """By how much, as a share of the mean, a stage may compute more than the mean where the integer program divides the
    operators so that the fewest bytes cross. A line of operators, cut so that the slowest stage is fastest, is tried
    beside it and knows no such limit."""

    name: ClassVar[str] = "tepdist"

    def division(self, graph: Graph) -> Division:
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range, InfeasibleError for an empty model."""
        if self.unbalance < 0:
            raise ConfigurationError(f"unbalance is {self.unbalance}", hint="it is a share from 0", where="strategy")
        if self.stages is not None:
            # Groups of devices that constraints ask for need not be equal.
            asked = any(constraint.devices for constraint in problem.constraints)
            counts = sorted({mesh.stages for mesh in meshes(problem.cluster)})
            if self.stages < 1 or (self.stages not in counts and not asked):
                raise ConfigurationError(
                    f"stages is {self.stages}, and {problem.cluster.size} devices cannot be shared equally by so many",
                    hint=f"one of {', '.join(map(str, counts))}",
                    where="strategy.stages",
                )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least simulated step. Raises InfeasibleError where memory holds none,
        ConfigurationError for constraints that cannot be followed."""
        return best_order(problem, self._placed)

    def _placed(self, problem: Problem) -> Placement:
        resolved = resolved_constraints(problem, own_sizes=True)
        found = constrained_meshes(problem.cluster, self.stages, resolved)
        if not found:
            raise InfeasibleError(f"no equal groups of these devices make {self.stages} stages")
        end = None if problem.time_limit is None else time.monotonic() + problem.time_limit
        outer = Outer(problem, LEVELS[self.level](problem.time_limit), self.unbalance, end)
        best = outer.run(found, required_sizes(problem, resolved))
        assert best.placement is not None
        inside = outer.in_micro_batches(best.micro_batches)
        check_constraints_met(inside.problem, best.placement, self.name)
        proof = inside.proof(best.placement) if len(best.placement.stages) == 1 else None
        return replace(best.placement, proof=proof, notes=search_notes(outer, best))
