"""Strategy `pase`, which splits each node so that the step is shortest, and two baselines,
`breadth_first` and `mcmc`, that search the same cost tables.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, SplitProof, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import (
    ResolvedConstraint,
    required_splits,
    resolve_constraints,
)
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory import parameter_state
from autopipe.passes.cost.memory_check import (
    check_memory_bound,
    check_operators,
    check_single_stage_devices,
    check_stage_devices,
    with_required_recomputation,
)
from autopipe.passes.partition.chain_cut import partition_chain
from autopipe.passes.placement.pase.paper_search import (
    find_strategy,
    make_paper_tables,
    paper_placement,
)
from autopipe.passes.schedule.device_order import best_group_order
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_degrees, constrained_stages
from autopipe.passes.sharding.search import ExactSolver, Solver, SplitTables, split_stages
from autopipe.passes.solvers.min_sum import Assignment, MinSum, TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.metropolis import random_walk


def place_in_stages(
    problem: Problem, count: int, solver: Solver, overlap: bool = False
) -> Placement:
    """Return a placement of the model in `count` stages. The nodes of each stage are split as
    `solver` proposes. The placement contains the proof of its splits, a lower bound on their cost.

    `overlap` is true if `solver` assumes that the gradient all-reduce overlaps with the backward of
    the last micro-batch.

    Raise ConfigurationError for constraints that contradict each other or cannot be satisfied, and
    InfeasibleError with the minimum excess if no placement fits into memory. Errors that `solver`
    raises are not caught.
    """
    # If an even fraction of the parameters and their state exceeds the memory, no search is needed
    # to know that memory does not suffice. With a single stage, the tensors saved for backward are
    # added, because the search for splits counts all of them, with or without recomputation.
    state = parameter_state(problem, ((each.value.name, 1) for each in problem.graph.parameters))
    parameters = state.total - state.low_precision_bytes
    saved = sum(each.kept_bytes for each in problem.work) if problem.train and count == 1 else 0
    check_memory_bound(
        problem, (parameters + saved) // problem.cluster.size, list(range(count)), count
    )
    resolved = resolve_constraints(problem)
    required = required_splits(resolved, sample_axes(problem.graph))
    groups = _stage_devices(problem, resolved, count)
    size = problem.micro_batch_size
    recompute = problem.recomputes_all
    stages = zip(
        partition_chain(problem, groups, constrained_stages(resolved, groups, "pase")),
        groups,
        strict=True,
    )
    placement = Placement(
        tuple(Stage(nodes, group, size, recompute=recompute) for nodes, group in stages)
    )
    check_degrees(problem, required, placement)
    check_stage_devices(problem, placement)
    found = split_stages(problem, placement, required, solver, overlap)
    return replace(with_required_recomputation(problem, found), proof=found.proof)


def _stage_devices(
    problem: Problem, resolved: Sequence[ResolvedConstraint], count: int
) -> list[tuple[int, ...]]:
    """Return the devices of each of `count` stages: equal groups of consecutive devices, or, for a
    single stage, the devices that constraints require. Raise ConfigurationError if `count` does not
    divide the number of devices, or if the constraints on a single stage require different devices.
    """
    size = problem.cluster.size
    width, remainder = divmod(size, count)
    if remainder:
        raise ConfigurationError(
            (
                f"{size} {plural(size, 'device')} cannot be divided evenly into {count} "
                f"{plural(count, 'stage')}"
            ),
            hint="choose a number of stages that divides the number of devices",
            where="strategy.stages",
        )
    with_devices = [each for each in resolved if each.devices is not None]
    if count > 1 or not with_devices:
        return [tuple(range(start, start + width)) for start in range(0, size, width)]
    for other in with_devices:
        if other.devices != with_devices[0].devices:
            raise ConfigurationError(
                f"{with_devices[0]} and {other} require different devices, but strategy.stages "
                "is 1",
                hint="set strategy.stages above 1, or remove the devices from the constraints",
            )
    return [with_devices[0].devices or ()]


_ROUNDS = 6
"""Maximum number of Lagrange multipliers (weights) that `solve_overlapped` tries."""

_CLOSE = 1e-6
"""Relative gap between cost and lower bound up to which a solution counts as optimal."""


def solve_overlapped(tables: SplitTables, solve: Callable[[MinSum], Assignment]) -> Assignment:
    """Return the best choice of splits if the gradient all-reduce overlaps with the backward of the
    last micro-batch.

    For a choice with gradient all-reduce G, last backward B and all other time R (seconds), the
    objective is

        minimise R + max(0, G - B)

    For each weight w in [0, 1], max(0, G - B) >= w (G - B). So the minimum of R + w (G - B), which
    `solve` finds on modified tables, is a lower bound (Lagrangian relaxation). w is moved by
    bisection towards G = B, at most `_ROUNDS` times. The cost of the result is the objective, and
    its bound is the highest lower bound.
    """
    # Variables of equal nodes share their arrays. The modified arrays are shared in the same way,
    # so that the solver recognises equal variables.
    triples = list(zip(tables.model.costs, tables.gradients, tables.backwards, strict=True))
    keys = [(id(costs), id(gradients), id(backward)) for costs, gradients, backward in triples]
    distinct = dict(zip(keys, triples, strict=True))
    best: Assignment | None = None
    bound = low = weight = 0.0
    high = 1.0
    for _ in range(_ROUNDS):
        modified = {
            key: costs - (1 - weight) * gradients - weight * backward
            for key, (costs, gradients, backward) in distinct.items()
        }
        assignment = solve(replace(tables.model, costs=tuple(modified[key] for key in keys)))
        chosen = zip(triples, assignment.choice, strict=True)
        excess = float(
            np.sum(
                [
                    gradients[number] - backward[number]
                    for (_, gradients, backward), number in chosen
                ]
            )
        )
        bound = max(bound, float(assignment.bound))
        cost = float(assignment.cost) - weight * excess + max(0.0, excess)
        if best is None or cost < best.cost:
            best = replace(assignment, cost=cost)
        if not assignment.fits or best.cost - bound <= _CLOSE * best.cost:
            break
        low, high = (weight, high) if excess > 0 else (low, weight)
        weight = 1.0 if weight == 0.0 else (low + high) / 2
    assert best is not None
    return replace(
        best,
        bound=min(bound, best.cost),
        proven=best.proven and best.cost - bound <= _CLOSE * best.cost,
    )


def solve_by_elimination(
    model: MinSum, ordering: str, hint: str, who: str = "", where: str = ""
) -> Assignment:
    """Return the assignment that the paper's dynamic programming (variable elimination) finds. It
    eliminates the variables in the order that `ordering` names.

    If its tables become too large, raise InfeasibleError with their size. `who` begins the message
    of this error; `hint` and `where` are its other fields.
    """
    try:
        return eliminate(model, ordering)
    except TableTooLargeError as error:
        raise InfeasibleError(
            f"{who}{error.message.partition(';')[0]}", hint=hint, where=where
        ) from error


@dataclass(frozen=True, slots=True)
class Pase:
    """Split each operator along any of its axes, so that the step is shortest."""

    solver: Literal["exact", "elimination"] = "exact"
    """`exact`: prunes configurations by a bound from the dual of the linear program, then
    eliminates the remaining variables; respects the memory limit. `elimination`: the paper's
    dynamic programming, which ignores memory and fails if its tables become too large.
    """
    ordering: Literal["generate_seq", "breadth_first", "min_fill"] = "generate_seq"
    """Order in which solver `elimination` processes the operators. `generate_seq` is the order of
    the paper.
    """
    costs: Literal["autopipe", "pase-paper"] = "autopipe"
    """`autopipe`: seconds on the given cluster. `pase-paper`: operations and words as in the paper,
    to reproduce its results.
    """
    search_space: Literal["executable", "paper"] = "executable"
    """`executable`: only splits for which programs can be generated. `paper`: all splits of the
    paper, executable or not; requires `costs: pase-paper`.
    """
    stages: int = 1
    """Number of pipeline stages, which have equally many devices. Splits are searched inside each
    stage.
    """
    overlap: bool = False
    """Assume that the gradient all-reduce overlaps with the backward of the last micro-batch, and
    count only the part of its time that exceeds this backward.
    """

    name: ClassVar[str] = "pase"

    def division(self, graph: Graph) -> Division:
        """Return `Division.MANY` if there are several stages, and otherwise `Division.FEW`."""
        return Division.MANY if self.stages > 1 else Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for incompatible options or a number of stages out of range.
        Raise InfeasibleError for a model without operators, or if a single stage would have devices
        of different types.
        """
        if (self.costs == "pase-paper") != (self.search_space == "paper"):
            raise ConfigurationError(
                f"costs {self.costs} and search_space {self.search_space} are incompatible",
                hint="set both costs: pase-paper and search_space: paper, or neither",
                where="strategy",
            )
        if not 1 <= self.stages <= problem.cluster.size:
            raise ConfigurationError(
                f"stages is {self.stages}, but the cluster has {problem.cluster.size} "
                f"{plural(problem.cluster.size, 'device')}",
                hint=f"set strategy.stages to 1 to {problem.cluster.size}",
                where="strategy",
            )
        if self.search_space == "paper" and (problem.constraints or self.stages > 1):
            raise ConfigurationError(
                "search_space: paper supports neither constraints nor several stages",
                hint="set search_space: executable",
                where="strategy",
            )
        check_operators(problem)
        if self.stages == 1:
            check_single_stage_devices(problem, self.name)

    def run(self, problem: Problem) -> Placement:
        """Return the placement with the shortest step.

        Raise ConfigurationError for constraints that contradict each other or cannot be satisfied.
        Raise InfeasibleError if no placement fits into memory (with the minimum excess), or if the
        tables of solver `elimination` become too large.
        """
        exact = ExactSolver(problem.time_limit)
        if self.search_space == "paper":
            found = find_strategy(
                make_paper_tables(problem), lambda model: self._solve(model, None, exact)
            )
            proof = SplitProof(found.cost, found.bound, found.proven, "operations")
            return replace(
                with_required_recomputation(problem, paper_placement(problem, found)), proof=proof
            )

        def solver(tables: SplitTables, limit: float | None) -> Assignment:
            """Return the best assignment of splits for a stage, within `limit` bytes unless it is
            None.
            """
            if self.overlap:
                return solve_overlapped(tables, lambda model: self._solve(model, limit, exact))
            return self._solve(tables.model, limit, exact)

        def place(problem: Problem) -> Placement:
            """Return the placement for one order of the cluster's device groups: the order in
            `problem`.
            """
            return place_in_stages(problem, self.stages, solver, self.overlap)

        return best_group_order(problem, place) if self.stages > 1 else place(problem)

    def _solve(self, model: MinSum, limit: float | None, exact: ExactSolver) -> Assignment:
        """Return the assignment that the solver of option `solver` finds, within `limit` bytes
        unless it is None.
        """
        if self.solver == "exact":
            return exact.solved(model, limit)
        assignment = solve_by_elimination(
            model, self.ordering, "set another ordering, or solver: exact", where="strategy"
        )
        # Elimination ignores the memory limit, so the memory of its result is compared with the
        # limit afterwards.
        return replace(assignment, fits=limit is None or assignment.memory <= limit)


class _OneStageBaseline:
    """A baseline strategy that places all nodes in one stage on all devices."""

    name: ClassVar[str]

    def division(self, graph: Graph) -> Division:
        """Return `Division.FEW`: a single stage needs no pipeline, so large micro-batches are
        preferred.
        """
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for a model without operators, or for devices of different types
        that may not share a stage.
        """
        check_operators(problem)
        check_single_stage_devices(problem, self.name)


@dataclass(frozen=True, slots=True)
class BreadthFirst(_OneStageBaseline):
    """Find the splits with the shortest step by dynamic programming over the operators in
    breadth-first order. This is a baseline for strategy pase.

    Elango, "PaSE" (IPDPS 2021), section III-A. The search is exact and ignores memory. It fails on
    most models with branches, because its tables become too large.
    """

    name: ClassVar[str] = "breadth_first"

    def run(self, problem: Problem) -> Placement:
        """Return the placement with the shortest step.

        Raise ConfigurationError for constraints that cannot be satisfied. Raise InfeasibleError if
        tables become too large (with their size), or if the placement does not fit into memory.
        """

        def solver(tables: SplitTables, limit: float | None) -> Assignment:
            """Return the best assignment of splits. Raise InfeasibleError if there is a memory
            limit.
            """
            if limit is not None:
                raise InfeasibleError(
                    "the placement exceeds the device memory, and breadth_first does not "
                    "support a memory limit",
                    hint="use strategy pase",
                )
            hint = "use strategy pase, which finds the same splits with smaller tables"
            who = "breadth_first cannot search this model: "
            return solve_by_elimination(tables.model, "breadth_first", hint, who)

        return place_in_stages(problem, 1, solver)


@dataclass(frozen=True, slots=True)
class Mcmc(_OneStageBaseline):
    """Change the split of one random operator at a time, and keep the best result. This is a
    baseline for strategy pase.

    The random walk starts with data parallelism. A change that increases the cost is accepted with
    a probability that decreases exponentially with the increase. This is the Metropolis search of
    Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks" (FlexFlow, 2018),
    section 6, applied to the splits and costs of strategy pase. The problem's seed determines the
    random changes.
    """

    iterations: int = 20_000
    """Maximum number of changes that are tried. The walk stops earlier after half this number of
    changes without an improvement.
    """
    temperature: float = 0.1
    """Increase of the cost that is accepted with probability 1/e, as a fraction of the mean cost of
    an operator.
    """

    name: ClassVar[str] = "mcmc"

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for negative options. Raise InfeasibleError for a model without
        operators, or for devices of different types that may not share a stage.
        """
        if self.iterations < 0 or self.temperature < 0:
            raise ConfigurationError(
                f"iterations is {self.iterations} and temperature is {self.temperature}, "
                "expected at least 0",
                where="strategy",
            )
        _OneStageBaseline.requires(self, problem)

    def run(self, problem: Problem) -> Placement:
        """Return the best placement that the random walk visits.

        Raise ConfigurationError for constraints that cannot be satisfied, and InfeasibleError if no
        visited placement fits into memory.
        """

        def walk_splits(tables: SplitTables, limit: float | None) -> Assignment:
            """Return the best assignment of splits that the walk visits, within `limit` bytes
            unless it is None.
            """
            # Variables for values that several nodes read follow the variables of the nodes. The
            # walk does not change these followers at random: their choices are determined by the
            # choices of their neighbours.
            followers = len(tables.model.costs) - len(tables.nodes)
            return random_walk(
                tables.model,
                [*_data_parallel_choice(problem, tables), *[0] * followers],
                iterations=self.iterations,
                temperature=self.temperature,
                seed=problem.seed,
                followers=followers,
                memory_limit=limit,
            )

        return replace(place_in_stages(problem, 1, walk_splits), proof=None)


def _data_parallel_choice(problem: Problem, tables: SplitTables) -> list[int]:
    """Return, for each node, the index of the permitted configuration that splits its samples the
    most and no other axis. If all permitted configurations split another axis, return the index of
    the first of them; if none is permitted, return 0.
    """
    axes = sample_axes(problem.graph).axes

    def degree(node: int, splits: Splits) -> int:
        """Return the number of parts of the node's samples: 1 if nothing is split, and 0 if another
        axis is split.
        """
        if any(split.axis != axes[node] for split in splits):
            return 0
        return splits[0].degree if splits else 1

    return [
        max(
            (number for number, cost in enumerate(costs) if cost < math.inf),
            key=lambda number: degree(node, configurations[number]),
            default=0,
        )
        for node, configurations, costs in zip(
            tables.nodes, tables.configurations, tables.model.costs, strict=False
        )
    ]
