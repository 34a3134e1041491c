"""The best splits of one stage that its devices' memory holds, by what lowering will really do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Problem
from autopipe.passes.cost.fit import device_memory, out_of_memory
from autopipe.passes.cost.splits import sample_axes
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.placement.pase.tables import Tables
from autopipe.passes.solvers.min_sum import Answer

Solver = Callable[[Tables, float | None], Answer]
"""Answers tables, within a number of bytes where one is given."""

_ROUNDS = 6
"""How often the limit that the search is given is corrected by what its answer really takes."""

_CLOSE = 0.02
"""Of the limit: it is corrected no further than that."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A placement whose stage in question has the splits of `answer`, and what that stage costs."""

    placement: Placement
    answer: Answer
    cost: StageCost
    excess: int
    """By how much the fullest of the stage's devices, `worst`, is over its limit."""
    worst: int


def fit_stage(problem: Problem, placement: Placement, index: int, tables: Tables, solver: Solver) -> Fitted:
    """`placement` with the best splits of stage `index` that its devices hold.

    The model's memory leaves out what comes and goes: how much of the limit that takes is found by trying, as it
    depends on the splits. Raises InfeasibleError, with the least excess that was met, where nothing fits.
    """

    def tried(limit: float | None) -> Fitted:
        answer = solver(tables, limit)
        return _measured(problem, _with_splits(placement, index, tables.splits(answer.choice)), index, answer)

    found = tried(None)
    if found.excess <= 0:
        return found
    best, least = None, found
    above, below = float(found.answer.memory), 0.0
    limit = above - found.excess
    for _ in range(_ROUNDS):
        found = tried(limit)
        if found.excess <= 0:
            best = found if best is None else min(best, found, key=lambda each: step_seconds(problem, each.cost))
            below = max(below, float(found.answer.memory))
        else:
            least = min(least, found, key=lambda each: each.excess)
            above = limit
        if best is None and not found.answer.fits:
            break
        if above - below < _CLOSE * above:
            break
        limit = (above + below) / 2 if best is not None else min(limit, float(found.answer.memory)) - found.excess
    if best is not None:
        return best
    need = problem.memory_of(least.worst) + least.excess
    raise out_of_memory(problem, [index], len(placement.stages), least.worst, need, least=True)


def _measured(problem: Problem, placement: Placement, index: int, answer: Answer) -> Fitted:
    """What a placement takes, whatever the model said."""
    costs = stage_costs(problem, placement)
    used = device_memory(problem, placement, costs)
    devices = placement.stages[index].devices
    excess, worst = max((used[device] - problem.memory_of(device), device) for device in devices)
    return Fitted(placement, answer, costs[index], excess, worst)


def step_seconds(problem: Problem, cost: StageCost) -> float:
    """What a stage takes of a step, one thing after the other."""
    return problem.micro_batches * (cost.forward_s + cost.backward_s) + cost.gradient_s + cost.update_s


def or_by_samples(problem: Problem, fitted: Fitted, index: int) -> Fitted:
    """The same, or the stage with nothing but its samples shared, where that is faster and fits.

    The model counts no latency of gradients' exchange and more than one way of some values, so that data parallelism,
    which is among its choices, can be better than it says.
    """
    stage = fitted.placement.stages[index]
    samples = sample_axes(problem.graph)
    if any(not samples.divides(node, len(stage.devices)) for node in stage.nodes):
        return fitted
    splits = samples.splits(stage.nodes, len(stage.devices))
    other = _measured(problem, _with_splits(fitted.placement, index, splits), index, fitted.answer)
    is_faster = step_seconds(problem, other.cost) < step_seconds(problem, fitted.cost)
    return other if other.excess <= 0 and is_faster else fitted


def _with_splits(placement: Placement, index: int, splits: tuple[tuple[int, tuple[Split, ...]], ...]) -> Placement:
    stages = list(placement.stages)
    stages[index] = replace(stages[index], splits=splits)
    return Placement(tuple(stages))
