"""Splits inside the stages of a placement, taken where the simulated step gets shorter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.analysis.constraints import required_splits, resolved_constraints
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import resized
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.search import Exact, split_problem


def split_further(problem: Problem, placement: Placement) -> Placement:
    """`placement` with its stages of several devices split as the search finds it best, or as they are.

    Which of the two is better for each follows from a step by kFkB (k = 1), as it is simulated: neighbours that are
    split differently have more to send. The step is never longer than it was, but for stages in which constraints ask
    for splits. Nodes, devices, micro-batches and recomputation stay. No two stages may share a device.

    Raises ConfigurationError for constraints that cannot be followed.
    """
    problem = resized(problem, max(stage.micro_batch_size for stage in placement.stages))
    own = {size: resized(problem, size) for size in {stage.micro_batch_size for stage in placement.stages}}
    asked = _constrained(problem, placement, own)
    found = dict(_searched(problem, placement, own, asked))
    settled = {
        index: found.pop(index)
        for index, stage in enumerate(placement.stages)
        if index in found and not asked.keys().isdisjoint(stage.nodes)
    }
    placement = _with(placement, settled)
    if not found:
        return placement
    trial = _Trial(problem, KForwardsKBackwards().run(problem, placement))
    before = {index: placement.stages[index] for index in found}
    best = (trial.improved(*each) for each in ((placement, found), (_with(placement, found), before)))
    return min(best, key=lambda each: each[0])[1]


def _with(placement: Placement, others: dict[int, Stage]) -> Placement:
    """The placement with some of its stages replaced."""
    stages = (others.get(index, stage) for index, stage in enumerate(placement.stages))
    return replace(placement, stages=tuple(stages))


def _constrained(problem: Problem, placement: Placement, own: dict[int, Problem]) -> dict[int, Splits]:
    """The splits that constraints ask for and the devices of a node's stage can have, by node."""
    resolved = resolved_constraints(problem)
    wished = (
        {size: required_splits(resolved, sample_axes(each.graph)) for size, each in own.items()} if resolved else {}
    )
    found = {}
    for stage in placement.stages:
        for node, splits in wished.get(stage.micro_batch_size, {}).items():
            if node in stage.nodes and len(stage.devices) % math.prod(split.degree for split in splits) == 0:
                found[node] = splits
    return found


def _searched(
    problem: Problem, placement: Placement, own: dict[int, Problem], asked: dict[int, Splits]
) -> Iterator[tuple[int, Stage]]:
    """The stages that the search splits differently within memory, with `asked` splits as they are."""
    inside, solver = split_problem(problem, placement, asked), Exact(problem.time_limit)
    for index, stage in enumerate(placement.stages):
        if len(stage.devices) > 1:
            try:
                best = inside.split(placement, index, solver, own=own[stage.micro_batch_size])
            except InfeasibleError:
                continue
            if best.placement.stages[index] != stage:
                yield index, best.placement.stages[index]


@dataclass(frozen=True, slots=True)
class _Trial:
    """A schedule by which placements are compared."""

    problem: Problem
    schedule: Schedule

    def improved(self, placement: Placement, others: dict[int, Stage]) -> tuple[float, Placement]:
        """Seconds of a step, and the placement with each stage in turn as in `others` if that is no worse for the step
        and its devices are busy for a shorter time, or if the step is shorter."""
        step, busy = self._step(placement)
        for index, other in others.items():
            changed = _with(placement, {index: other})
            changed_step, changed_busy = self._step(changed)
            if (changed_step, changed_busy[index]) < (step, busy[index]):
                placement, step, busy = changed, changed_step, changed_busy
        return step, placement

    def _step(self, placement: Placement) -> tuple[float, list[float]]:
        """Seconds of a step, and those in which each stage's devices are busy."""
        prediction = predict(self.problem, placement)
        step = simulate(self.schedule, [stage.devices for stage in placement.stages], prediction).end
        counts = (self.problem.batch_size // stage.micro_batch_size for stage in placement.stages)
        busy = [
            count * (each.forward_s + each.backward_s) + each.gradient_s + each.update_s
            for count, each in zip(counts, prediction.stages, strict=True)
        ]
        return step, busy
