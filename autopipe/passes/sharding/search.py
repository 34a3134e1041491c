"""The search for the splits inside stages whose nodes, devices and micro-batches are settled, within memory.

Each stage is searched by itself, on the tables of its configurations; its memory is counted as lowering will use it,
and bounds on the bytes that come and go are tightened until the answer fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, SplitProof, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.analysis.stage_nodes import StageNodes, assign_nodes
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory_check import device_memory, in_flight, out_of_memory
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.tables import Tables, make_tables
from autopipe.passes.solvers.min_sum import Assignment, MinSum, solve

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


def _fit_stage(
    problem: Problem, placement: Placement, index: int, tables: Tables, solver: Solver, overlap: bool
) -> FittedPlacement:
    """`placement` with the best splits of stage `index` that its devices hold.

    What comes and goes is the most that one node needs while it runs. So several bounds on that are tried: under each,
    configurations that need more are forbidden, and what remains is for the sum of what stays. Raises InfeasibleError,
    with the least excess that was met, where nothing fits.
    """

    def measured(answer: Assignment) -> FittedPlacement:
        proof = SplitProof(float(answer.cost), float(answer.bound), answer.proven)
        return _with_splits(problem, placement, index, tables.splits(answer.choice), proof)

    fastest = solver(tables, None)
    trials = [measured(fastest)]
    room = min(map(problem.memory_of, placement.stages[index].devices))
    before = room
    for most in _bounds_on_passing(tables, fastest, room) if trials[0].excess > 0 else ():
        if trials[-1].excess <= 0 and before - most < _APART * room:
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
            trials.append(measured(answer))
            if trials[-1].excess <= 0 or not answer.fits:
                break
            unknown += trials[-1].excess
    fitting = [each for each in trials if each.excess <= 0]
    if fitting:
        count = problem.batch_size // placement.stages[index].micro_batch_size
        best = min(fitting, key=lambda each: step_seconds(each.cost, count, overlap))
        # Under a bound on what comes and goes an answer is proven for that bound alone.
        bound = trials[0].proof.lower_bound
        optimal = best is trials[0] and best.proof.optimal
        return replace(best, proof=SplitProof(best.proof.cost, bound, optimal))
    least = min(trials, key=lambda each: each.excess)
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


def _with_splits(
    problem: Problem, placement: Placement, index: int, splits: tuple[tuple[int, Splits], ...], proof: SplitProof
) -> FittedPlacement:
    """The placement with these splits of a stage, and what it takes whatever the model said."""
    stages = list(placement.stages)
    stages[index] = replace(stages[index], splits=splits)
    found = replace(placement, stages=tuple(stages))
    costs = stage_costs(problem, found)
    used = device_memory(problem, found, costs)
    excess, worst = max((used[device] - problem.memory_of(device), device) for device in stages[index].devices)
    return FittedPlacement(found, proof, costs[index], excess, worst)


def _or_by_samples(
    problem: Problem, graph: Graph, fitted: FittedPlacement, index: int, overlap: bool
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


@dataclass(frozen=True, slots=True)
class SplitProblem:
    """Nodes and options of each stage of a placement, for the search for its splits."""

    problem: Problem
    plans: tuple[StageNodes, ...]
    options: tuple[StageOptions, ...]

    def split(
        self, placement: Placement, index: int, solver: Solver, overlap: bool = False, own: Problem | None = None
    ) -> FittedPlacement:
        """`placement` with stage `index` split as `solver` finds it best, or by its samples where that is faster.

        `overlap` says whether `solver` counts the exchange of gradients as hidden by the last micro-batch's backward;
        `own` is the problem on the stage's micro-batches, where that is known. Raises InfeasibleError, with the least
        excess, where nothing fits into memory, and what `solver` raises.
        """
        stage, options = placement.stages[index], self.options[index]
        own = own or resized(self.problem, stage.micro_batch_size)
        tables = make_tables(own, [node for node, _ in self.plans[index].nodes], stage.devices, options)
        best = _fit_stage(self.problem, placement, index, tables, solver, overlap)
        if any(node in options.allowed for node in stage.nodes):
            return best
        return _or_by_samples(self.problem, own.graph, best, index, overlap)


def split_problem(problem: Problem, placement: Placement, fixed: Mapping[int, Splits]) -> SplitProblem:
    """The insides of `placement`'s stages, with the splits of `fixed` nodes as they are there."""
    graph = problem.graph
    plans = assign_nodes(graph, placement, problem.wanted)
    computed = [{node for node, _ in plan.nodes} for plan in plans]
    whole: Splits = ()
    # What several stages compute for themselves is cheap; splits of one group mean nothing on another.
    shared = {node: (whole,) for node in recomputed_nodes(graph) if sum(node in each for each in computed) > 1}
    read = [{name for node in each for name in graph.nodes[node].inputs if graph.parameter(name)} for each in computed]
    torn = frozenset(name for names in read for name in names if sum(name in each for each in read) > 1)
    options = (
        StageOptions(
            allowed={**shared, **{node: (splits,) for node, splits in fixed.items()}},
            given=frozenset(plan.outputs),
            whole=torn,
            in_flight=kept,
            recompute=stage.recompute,
        )
        for stage, plan, kept in zip(placement.stages, plans, in_flight(problem, placement), strict=True)
    )
    return SplitProblem(problem, plans, tuple(options))


def split_stages(
    problem: Problem, placement: Placement, fixed: Mapping[int, Splits], solver: Solver, overlap: bool = False
) -> Placement:
    """`placement` with every stage split so, and what is proven of that: what all stages cost together.

    Raises InfeasibleError where memory does not hold any placement, with the least excess, and what `solver` raises.
    """
    inside = split_problem(problem, placement, fixed)
    proofs = []
    for index in range(len(placement.stages)):
        best = inside.split(placement, index, solver, overlap)
        placement = best.placement
        proofs.append(best.proof)
    cost, bound = sum(each.cost for each in proofs), sum(each.lower_bound for each in proofs)
    return replace(placement, proof=SplitProof(cost, bound, all(each.optimal for each in proofs)))


_PATIENCE_S = 2.0
"""Of work within a memory limit, where there is no time limit: several limits are tried, and for a Llama of 80 layers
on 64 devices five times the work finds steps shorter by a thousandth."""


class Exact:
    """Answers tables by a dual bound, pruning, and elimination of what is left; within memory where that is asked for.

    Of `time_limit` seconds, counted from now on, a search within memory takes half of what is left: others follow.
    """

    def __init__(self, time_limit: float | None) -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit

    def __call__(self, tables: Tables, limit: float | None) -> Assignment:
        """The best choice, of those that need at most `limit` bytes where that is given."""
        return self.solved(tables.model, limit)

    def solved(self, model: MinSum, limit: float | None) -> Assignment:
        left = None if self._end is None else max(0.01, self._end - time.monotonic())
        if limit is None:
            return solve(model, None, left)
        return solve(model, limit, None if left is None else left / 2, _PATIENCE_S)
