"""The best splits of one stage that its devices' memory holds, by what lowering will really do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.memory_check import device_memory, out_of_memory
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from autopipe.passes.solvers.min_sum import Assignment
from autopipe.passes.spmd.search.configurations import Splits
from autopipe.passes.spmd.search.tables import Tables

Solver = Callable[[Tables, float | None], Assignment]
"""Answers tables, within a number of bytes where one is given."""

_BOUNDS = 8
"""The most bounds on what comes and goes that are tried where memory is short."""

_APART = 0.01
"""Of a device's memory: by how much bounds differ at least, to be worth a search each."""

_ROUNDS = 3
"""How often the limit is corrected by what an answer really takes beyond what the model says."""


@dataclass(frozen=True, slots=True)
class FittedPlacement:
    """A placement with the splits of the stage in question, what is proven of them, and what lowering makes of them."""

    placement: Placement
    proof: SplitProof
    cost: StageCost
    excess: int
    """By how much the fullest of the stage's devices, `worst`, is over its limit."""
    worst: int


def fit_stage(
    problem: Problem, placement: Placement, index: int, tables: Tables, solver: Solver, overlap: bool = False
) -> FittedPlacement:
    """`placement` with the best splits of stage `index` that its devices hold.

    What comes and goes is the most that one node needs while it runs. So several bounds on that are tried: under each,
    configurations that need more are forbidden, and what remains is for the sum of what stays. Raises InfeasibleError,
    with the least excess that was met, where nothing fits.
    """
    fastest = solver(tables, None)
    found = _measured(problem, placement, index, tables, fastest)
    tried = [found]
    room = min(map(problem.memory_of, placement.stages[index].devices))
    before = room
    for most in _bounds_on_passing(tables, fastest, room) if found.excess > 0 else ():
        if tried[-1].excess <= 0 and before - most < _APART * room:
            break
        before = most
        # What the model does not know: values that several nodes keep in different blocks, buffers of messages.
        unknown = 0
        bounded = tables.passing_at_most(most)
        for _ in range(_ROUNDS):
            try:
                answer = solver(bounded, room - most - unknown)
            except InfeasibleError:
                break
            found = _measured(problem, placement, index, tables, answer)
            tried.append(found)
            if found.excess <= 0 or not answer.fits:
                break
            unknown += found.excess
    fitting = [each for each in tried if each.excess <= 0]
    if fitting:
        count = problem.batch_size // placement.stages[index].micro_batch_size
        best = min(fitting, key=lambda each: step_seconds(each.cost, count, overlap))
        # Under a bound on what comes and goes an answer is proven for that bound alone.
        bound = tried[0].proof.lower_bound
        optimal = best is tried[0] and best.proof.optimal
        return replace(best, proof=SplitProof(best.proof.cost, bound, optimal))
    least = min(tried, key=lambda each: each.excess)
    need = problem.memory_of(least.worst) + least.excess
    raise out_of_memory(problem, [index], len(placement.stages), least.worst, need, least=True)


def _bounds_on_passing(tables: Tables, answer: Assignment, room: int) -> list[int]:
    """From what an answer needs down to what every choice does: all that some configuration needs, well apart."""
    least = max(int(each.min()) for each in tables.passing)
    most = max(int(each[number]) for each, number in zip(tables.passing, answer.choice, strict=False))
    between = np.unique(np.concatenate(list({id(each): each for each in tables.passing}.values())))
    between = between[(between >= least) & (between <= most)]
    count = min(_BOUNDS, 2 + int((most - least) / (_APART * room)))
    chosen = np.unique(np.linspace(0, len(between) - 1, count).round().astype(int))
    found: list[int] = between[chosen][::-1].tolist()
    return found


def _measured(
    problem: Problem, placement: Placement, index: int, tables: Tables, answer: Assignment
) -> FittedPlacement:
    """The placement with an answer's splits, and what it takes whatever the model said."""
    proof = SplitProof(float(answer.cost), float(answer.bound), answer.proven)
    return _with_splits(problem, placement, index, tables.splits(answer.choice), proof)


def _with_splits(
    problem: Problem, placement: Placement, index: int, splits: tuple[tuple[int, Splits], ...], proof: SplitProof
) -> FittedPlacement:
    stages = list(placement.stages)
    stages[index] = replace(stages[index], splits=splits)
    found = replace(placement, stages=tuple(stages))
    costs = stage_costs(problem, found)
    used = device_memory(problem, found, costs)
    excess, worst = max((used[device] - problem.memory_of(device), device) for device in stages[index].devices)
    return FittedPlacement(found, proof, costs[index], excess, worst)


def or_by_samples(
    problem: Problem, graph: Graph, fitted: FittedPlacement, index: int, overlap: bool = False
) -> FittedPlacement:
    """The same, or the stage with nothing but its samples shared, where that is faster and fits.

    `graph` is the model on micro-batches of the stage's size.

    The model counts no latency of gradients' exchange and more than one way of some values, so that data parallelism,
    which is among its choices, can be better than it says.
    """
    stage = fitted.placement.stages[index]
    samples = sample_axes(graph)
    if any(not samples.divides(node, len(stage.devices)) for node in stage.nodes):
        return fitted
    splits = samples.splits(stage.nodes, len(stage.devices))
    other = _with_splits(problem, fitted.placement, index, splits, fitted.proof)
    count = problem.batch_size // stage.micro_batch_size
    seconds = step_seconds(other.cost, count, overlap)
    if other.excess > 0 or seconds >= step_seconds(fitted.cost, count, overlap):
        return fitted
    bound = fitted.proof.lower_bound
    return replace(other, proof=SplitProof(max(seconds, bound), bound, seconds <= bound))
