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


@dataclass(frozen=True, slots=True)
class Fitted:
    """A placement whose stage `index` has the splits of `answer`, and what that stage costs."""

    placement: Placement
    answer: Answer
    cost: StageCost


def fit_stage(problem: Problem, placement: Placement, index: int, tables: Tables, solver: Solver) -> Fitted:
    """`placement` with the best splits of stage `index` that its devices hold.

    The model's memory leaves out what passes: what an answer really needs beyond the model's figure is taken off the
    limit of the next. Raises InfeasibleError, with the least excess that was met, where nothing fits.
    """
    devices = placement.stages[index].devices
    limit: float | None = None
    least: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        answer = solver(tables, limit)
        found = _with_splits(placement, index, tables.splits(answer.choice))
        costs = stage_costs(problem, found)
        used = device_memory(problem, found, costs)
        excess, worst = max((used[device] - problem.memory_of(device), device) for device in devices)
        if excess <= 0:
            return Fitted(found, answer, costs[index])
        least = min(least or (excess, worst), (excess, worst))
        if not answer.fits:
            break
        limit = min(float(answer.memory), limit or float("inf")) - excess
    assert least is not None
    excess, worst = least
    need = problem.memory_of(worst) + excess
    raise out_of_memory(problem, [index], len(placement.stages), worst, need, least=True)


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
    other = _with_splits(fitted.placement, index, samples.splits(stage.nodes, len(stage.devices)))
    costs = stage_costs(problem, other)
    used = device_memory(problem, other, costs)
    fits = all(used[device] <= problem.memory_of(device) for device in stage.devices)
    if fits and step_seconds(problem, costs[index]) < step_seconds(problem, fitted.cost):
        return replace(fitted, placement=other, cost=costs[index])
    return fitted


def _with_splits(placement: Placement, index: int, splits: tuple[tuple[int, tuple[Split, ...]], ...]) -> Placement:
    stages = list(placement.stages)
    stages[index] = replace(stages[index], splits=splits)
    return Placement(tuple(stages))
