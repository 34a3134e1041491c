"""PaSE as a strategy, the splits of every node that make a step shortest, and two baselines over
the same tables.

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
    resolved_constraints,
)
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import (
    check_kinds,
    check_least,
    check_one_kind,
    check_operators,
    fitted,
)
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.placement.pase.paper_search import find_strategy, placement_of, tables_of
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_degrees, constrained_stages
from autopipe.passes.sharding.search import Exact, Solver, Tables, split_stages
from autopipe.passes.solvers.min_sum import Assignment, MinSum, TableTooLargeError, eliminate
from autopipe.passes.solvers.min_sum.metropolis import walk


def in_stages(problem: Problem, count: int, solver: Solver, overlap: bool = False) -> Placement:
    """The model in `count` stages, each split as `solver` answers, with what is proven of that.

    `overlap` says whether `solver` counts the exchange of gradients as hidden by the last
    micro-batch's backward.

    Raises ConfigurationError naming constraints that contradict one another or cannot be followed,
    InfeasibleError where memory does not hold any placement, with the least excess, and what
    `solver` raises.
    """
    # Where not even equal shares of what must be kept fit, no search is needed to tell. Of what one
    # stage keeps the search for splits counts all, recomputed or not.
    state = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters))
    parameters = state.total - state.low_precision_bytes
    kept = sum(each.kept_bytes for each in problem.work) if problem.train and count == 1 else 0
    check_least(problem, (parameters + kept) // problem.cluster.size, list(range(count)), count)
    resolved = resolved_constraints(problem)
    required = required_splits(resolved, sample_axes(problem.graph))
    groups = _groups(problem, resolved, count)
    size = problem.micro_batch_size
    again = problem.recomputes_all
    cut = zip(
        cut_into_stages(problem, groups, constrained_stages(resolved, groups, "pase")),
        groups,
        strict=True,
    )
    placement = Placement(tuple(Stage(nodes, group, size, recompute=again) for nodes, group in cut))
    check_degrees(problem, required, placement)
    check_kinds(problem, placement)
    found = split_stages(problem, placement, required, solver, overlap)
    return replace(fitted(problem, found), proof=found.proof)


def _groups(
    problem: Problem, resolved: Sequence[ResolvedConstraint], count: int
) -> list[tuple[int, ...]]:
    """The devices of each stage: equal groups in order; those asked for where there is one
    stage.
    """
    size = problem.cluster.size
    width, rest = divmod(size, count)
    if rest:
        raise ConfigurationError(
            (
                f"{size} {plural(size, 'device')} cannot be shared equally by {count} "
                f"{plural(count, 'stage')}"
            ),
            hint="the number of stages must divide that of devices",
            where="strategy.stages",
        )
    asked = [each for each in resolved if each.devices is not None]
    if count > 1 or not asked:
        return [tuple(range(start, start + width)) for start in range(0, size, width)]
    for other in asked:
        if other.devices != asked[0].devices:
            raise ConfigurationError(
                f"{asked[0]} and {other} ask for different devices, and there is one stage",
                hint="ask for several stages (strategy.stages), or let pase choose",
            )
    return [asked[0].devices or ()]


_ROUNDS = 6
"""Weights that are tried at most."""

_CLOSE = 1e-6
"""Share of a step below which a gap is none."""


def solve_overlapped(tables: Tables, solve: Callable[[MinSum], Assignment]) -> Assignment:
    """The best choice found and its bound, its cost a step in which backward hides the exchange of
    gradients.

    A step then takes max(0, G - B) beyond all else, with G the exchange of gradients and B the last
    micro-batch's backward, which hides it. As max(0, G - B) is at least w (G - B) for any w from 0
    to 1, a search with that in its place bounds the step from below; w is moved to where G and B
    are even (Lagrangian relaxation).
    """
    # Equal costs are shared, so that what is weighed once is, too.
    triples = list(zip(tables.model.costs, tables.gradients, tables.backwards, strict=True))
    keys = [(id(costs), id(gradients), id(backward)) for costs, gradients, backward in triples]
    distinct = dict(zip(keys, triples, strict=True))
    best: Assignment | None = None
    bound = low = weight = 0.0
    high = 1.0
    for _ in range(_ROUNDS):
        weighed = {
            key: costs - (1 - weight) * gradients - weight * backward
            for key, (costs, gradients, backward) in distinct.items()
        }
        answer = solve(replace(tables.model, costs=tuple(weighed[key] for key in keys)))
        chosen = zip(triples, answer.choice, strict=True)
        beyond = float(
            np.sum(
                [
                    gradients[number] - backward[number]
                    for (_, gradients, backward), number in chosen
                ]
            )
        )
        bound = max(bound, float(answer.bound))
        cost = float(answer.cost) - weight * beyond + max(0.0, beyond)
        if best is None or cost < best.cost:
            best = replace(answer, cost=cost)
        if not answer.fits or best.cost - bound <= _CLOSE * best.cost:
            break
        low, high = (weight, high) if beyond > 0 else (low, weight)
        weight = 1.0 if weight == 0.0 else (low + high) / 2
    assert best is not None
    return replace(
        best,
        bound=min(bound, best.cost),
        proven=best.proven and best.cost - bound <= _CLOSE * best.cost,
    )


def eliminated(
    model: MinSum, ordering: str, hint: str, who: str = "", where: str = ""
) -> Assignment:
    """The answer of the paper's dynamic programming. Raises InfeasibleError, with their size, for
    tables too large.
    """
    try:
        return eliminate(model, ordering)
    except TableTooLargeError as error:
        raise InfeasibleError(
            f"{who}{error.message.partition(';')[0]}", hint=hint, where=where
        ) from error


@dataclass(frozen=True, slots=True)
class Pase:
    """Splits every operator along any of its axes, so that a step is shortest."""

    solver: Literal["exact", "elimination"] = "exact"
    """`exact`: a bound from the dual, pruning, and elimination of what is left; within memory.
    `elimination`: the paper's dynamic programming, which knows no memory and gives up where tables
    are too large.
    """
    ordering: Literal["generate_seq", "breadth_first", "min_fill"] = "generate_seq"
    """In which order `elimination` takes the operators; the paper's is `generate_seq`."""
    costs: Literal["autopipe", "pase-paper"] = "autopipe"
    """`autopipe`: seconds on the cluster at hand. `pase-paper`: the paper's operations and words,
    to reproduce it.
    """
    search_space: Literal["executable", "paper"] = "executable"
    """`executable`: the splits that programs can be generated for. `paper`: those of the paper,
    executable or not; it goes with `costs: pase-paper`.
    """
    stages: int = 1
    """Pipeline stages, of equal groups of devices; splits are searched inside each."""
    overlap: bool = False
    """True if the exchange of gradients counts only as far as the last micro-batch's backward does
    not hide it.
    """

    name: ClassVar[str] = "pase"

    def division(self, graph: Graph) -> Division:
        return Division.MANY if self.stages > 1 else Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options that do not go together, InfeasibleError for an
        empty model.
        """
        if (self.costs == "pase-paper") != (self.search_space == "paper"):
            raise ConfigurationError(
                f"costs {self.costs} and search_space {self.search_space} do not go together",
                hint="take costs: pase-paper with search_space: paper, or neither",
                where="strategy",
            )
        if not 1 <= self.stages <= problem.cluster.size:
            raise ConfigurationError(
                f"stages is {self.stages}, and there are {problem.cluster.size} "
                f"{plural(problem.cluster.size, 'device')}",
                hint="give each stage at least one device",
                where="strategy",
            )
        if self.search_space == "paper" and (problem.constraints or self.stages > 1):
            raise ConfigurationError(
                "the paper's search space has neither constraints nor stages",
                hint="take search_space: executable",
                where="strategy",
            )
        check_operators(problem)
        if self.stages == 1:
            check_one_kind(problem, self.name)

    def run(self, problem: Problem) -> Placement:
        """Raises ConfigurationError naming constraints that contradict one another or cannot be
        followed.

        InfeasibleError where memory does not hold any placement, with the least excess, or tables
        are too large.
        """
        exact = Exact(problem.time_limit)
        if self.search_space == "paper":
            found = find_strategy(
                tables_of(problem), lambda model: self._solved(model, None, exact)
            )
            proof = SplitProof(found.cost, found.bound, found.proven, "operations")
            return replace(fitted(problem, placement_of(problem, found)), proof=proof)

        def solver(tables: Tables, limit: float | None) -> Assignment:
            if self.overlap:
                return solve_overlapped(tables, lambda model: self._solved(model, limit, exact))
            return self._solved(tables.model, limit, exact)

        def placed(problem: Problem) -> Placement:
            return in_stages(problem, self.stages, solver, self.overlap)

        return best_order(problem, placed) if self.stages > 1 else placed(problem)

    def _solved(self, model: MinSum, limit: float | None, exact: Exact) -> Assignment:
        """The answer of the chosen solver, within `limit` bytes."""
        if self.solver == "exact":
            return exact.solved(model, limit)
        answer = eliminated(
            model, self.ordering, "take another ordering, or solver: exact", where="strategy"
        )
        # It knows no limit: whether its answer keeps one is found afterwards.
        return replace(answer, fits=limit is None or answer.memory <= limit)


class _OneStage:
    """A baseline: one stage, whose devices are equal."""

    name: ClassVar[str]

    def division(self, graph: Graph) -> Division:
        return Division.FEW

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError for an empty model or devices that differ."""
        check_operators(problem)
        check_one_kind(problem, self.name)


@dataclass(frozen=True, slots=True)
class BreadthFirst(_OneStage):
    """Finds the splits that make a step shortest by dynamic programming in breadth-first order: a
    baseline for pase.

    Elango, "PaSE" (IPDPS 2021), section III-A. It is exact, knows no memory limit while it
    searches, and gives up where its tables do not fit: on most models with branches.
    """

    name: ClassVar[str] = "breadth_first"

    def run(self, problem: Problem) -> Placement:
        """Raises ConfigurationError for constraints that cannot be followed, InfeasibleError where
        tables are too large, with their size, or memory does not hold what is found.
        """

        def solver(tables: Tables, limit: float | None) -> Assignment:
            if limit is not None:
                raise InfeasibleError(
                    "breadth_first knows no memory limit", hint="take strategy pase"
                )
            hint = "strategy pase finds the same with less"
            who = "breadth_first cannot search this model: "
            return eliminated(tables.model, "breadth_first", hint, who)

        return in_stages(problem, 1, solver)


@dataclass(frozen=True, slots=True)
class Mcmc(_OneStage):
    """Changes one operator's split at random, again and again, and keeps the best it meets: a
    baseline for pase.

    It begins with data parallelism, and accepts what costs more with a chance that falls with the
    difference: the Metropolis search of Jia et al., "Beyond Data and Model Parallelism for Deep
    Neural Networks" (FlexFlow, 2018), section 6, over pase's splits and costs. The problem's seed
    draws the changes.
    """

    iterations: int = 20_000
    """The most changes that are tried; fewer where half of them brought nothing better."""
    temperature: float = 0.1
    """How much worse a change may be for a chance of 1 in e, as a share of what one operator costs
    on average.
    """

    name: ClassVar[str] = "mcmc"

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range, InfeasibleError for an empty model or
        uneven devices.
        """
        if self.iterations < 0 or self.temperature < 0:
            raise ConfigurationError(
                "iterations and temperature must be 0 or more", where="strategy"
            )
        _OneStage.requires(self, problem)

    def run(self, problem: Problem) -> Placement:
        """Raises ConfigurationError for constraints that cannot be followed, InfeasibleError where
        nothing that the walk met fits into memory.
        """

        def walked(tables: Tables, limit: float | None) -> Assignment:
            # Variables beyond the nodes follow their neighbours (`Tables`).
            followers = len(tables.model.costs) - len(tables.nodes)
            return walk(
                tables.model,
                [*_data_parallel(problem, tables), *[0] * followers],
                iterations=self.iterations,
                temperature=self.temperature,
                seed=problem.seed,
                followers=followers,
                memory_limit=limit,
            )

        return replace(in_stages(problem, 1, walked), proof=None)


def _data_parallel(problem: Problem, tables: Tables) -> list[int]:
    """For each node the configuration that shares its samples among most devices, and splits
    nothing else if it may.
    """
    axes = sample_axes(problem.graph).axes

    def degree(node: int, splits: Splits) -> int:
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
