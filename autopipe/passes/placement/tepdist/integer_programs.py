"""Reduce a min-sum model, and solve the reduced model as one integer linear program.

A min-sum model has variables with several configurations; a choice gives each variable one
configuration. The dual of the program's linear relaxation (`min_sum.branch_and_bound.Dual`) gives,
for each configuration, a lower bound on the cost of all choices that contain it. A configuration
whose bound exceeds the cost of a known choice is removed (reduced-cost fixing). If too many
configurations remain, only the most promising are kept. The bounds of the removed configurations
then limit the bound that can be proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers import milp
from autopipe.passes.solvers.min_sum import Assignment, Edge, MinSum
from autopipe.passes.solvers.min_sum.branch_and_bound import Subproblem
from autopipe.passes.solvers.min_sum.model import (
    Array,
    absorb_fixed_nodes,
    add_memory_cost,
    all_configurations,
    all_forbidden_error,
    configurations_at,
    restrict,
)
from autopipe.passes.solvers.pulp_client import AUTO

CLOSE = 1e-4
"""Relative gap between cost and bound at which a search within a memory limit stops."""
NODES = 50
"""Maximum number of branch-and-bound nodes of a search within a memory limit. More nodes rarely
help, because the relaxation is weak.
"""
PATIENCE_S = 15.0
"""Maximum seconds for one integer program with a memory limit."""
SAME = 1e-9
"""Relative gap that is attributed to rounding errors."""
ROUNDING = 1e-6
"""Fraction of a memory limit by which the result of a solver may exceed it."""


def cheapest_choice(
    model: MinSum,
    seconds: float,
    known: Sequence[int] = (),
    limit: float | None = None,
    solver: str = AUTO,
) -> Assignment:
    """Return the cheapest choice of a model by one integer program, within `limit` bytes unless it
    is None. A choice gives each variable one configuration. The model must be merged: at most one
    edge between two variables (`merge_edges`).

    `known` is a choice that satisfies the limit, or () if there is none. After `seconds`, the best
    choice so far is returned. Within a memory limit the search also stops at a relative gap of
    `CLOSE` and after `NODES` branch-and-bound nodes. Raise InfeasibleError if there is no choice,
    or if none was found in time and none is known.
    """
    assignment = _solve_program(model, seconds, known, limit, solver)
    if limit is not None and assignment.memory > limit:
        # The choice exceeds the limit only by rounding errors of the solver. The program is
        # therefore solved again with a limit that is smaller by about these errors.
        stricter = _solve_program(model, seconds, known, limit * (1 - ROUNDING), solver)
        assignment = replace(stricter, bound=min(assignment.bound, stricter.bound), proven=False)
    return assignment


def _solve_program(
    model: MinSum, seconds: float, known: Sequence[int], limit: float | None, solver: str
) -> Assignment:
    """Return the choice (one configuration per variable) that the solver finds for the integer
    program of `model`. Its cost and memory are computed exactly. It may exceed `limit` by rounding
    errors.
    """
    program, node_columns, edge_columns = _build_program(absorb_fixed_nodes(model), limit)
    start = None
    if known:
        start = program.lower.copy()
        for columns, number in zip(node_columns, known, strict=True):
            start[columns[number]] = 1.0
        for edge, columns in edge_columns:
            start[columns[known[edge.source], known[edge.target]]] = 1.0
    if limit is None:
        found = milp.solve(program, seconds, 0.0, start, None, solver)
    else:
        found = milp.solve(program, min(seconds, PATIENCE_S), CLOSE, start, NODES, solver)
    if not found.found:
        raise InfeasibleError(
            f"the integer program that chooses the splits has no solution: {found.status.value}"
        )
    choice = tuple(int(found.values[columns].argmax()) for columns in node_columns)
    cost = model.cost_of(choice)
    memory = model.memory_of(choice)
    proven = found.proven and (limit is None or found.gap <= SAME)
    bound = cost if proven else min(float(cost), found.bound)
    return Assignment(choice, cost, bound, proven, memory, limit is None or memory <= limit)


def _build_program(
    model: MinSum, limit: float | None
) -> tuple[milp.Model, list[Array], list[tuple[Edge, Array]]]:
    """Return (program, columns of each variable, columns of each edge) for a model without edges at
    variables with one configuration.

    There is one binary column per configuration, and one continuous column per allowed pair of
    configurations of an edge; the column number of a forbidden pair is -1.

    With x[v, i] = 1 if variable v has configuration i, and y[e, i, j] = 1 if the source of edge e
    has i and its target has j:

        minimise    sum of costs[v][i] x[v, i]  +  sum of costs[e][i, j] y[e, i, j]
        subject to  sum over i of x[v, i] = 1              each variable has one configuration
                    sum over j of y[e, i, j] = x[source, i]    pairs agree with the source
                    sum over i of y[e, i, j] = x[target, j]    pairs agree with the target
                    sum of memory x + sum of memory y <= limit   only with a memory limit

    If all x are integral, all y are too. Each array of costs is reduced by its minimum, which
    improves the scaling of the relaxation; one column that is fixed at 1 carries the sum of these
    minima. Raise InfeasibleError if all entries of a variable or edge are forbidden.
    """
    builder = milp.Builder()
    constant = 0.0
    places: list[Array] = []
    pairs: list[tuple[Edge, Array]] = []
    needed: list[tuple[Array, Array | None]] = []
    for costs, needs in zip(model.costs, model.node_memory, strict=True):
        least, own = _subtract_minimum(costs)
        constant += least
        columns = builder.add_variables(len(own), cost=own, upper=np.isfinite(costs))
        builder.add_rows(np.zeros_like(columns), columns, lower=1, upper=1)
        places.append(columns)
        needed.append((columns, needs))
    for edge in model.edges:
        least, own = _subtract_minimum(edge.costs)
        constant += least
        allowed = np.isfinite(edge.costs)
        columns = np.full(own.shape, -1)
        columns[allowed] = builder.add_variables(
            int(allowed.sum()), cost=own[allowed], integral=False
        )
        for end, axis in ((edge.source, 0), (edge.target, 1)):
            row = np.nonzero(allowed)[axis]
            sides = np.arange(len(places[end]))
            entries = (
                (row, sides),
                (columns[allowed], places[end]),
                (np.ones(len(row)), -np.ones(len(sides))),
            )
            rows, variables, factors = map(np.concatenate, entries)
            builder.add_rows(rows, variables, factors, lower=0, upper=0)
        pairs.append((edge, columns))
        needed.append((columns[allowed], None if edge.memory is None else edge.memory[allowed]))
    # Memory is divided by the limit, so that the coefficients of this row have the magnitude of the
    # other rows.
    if limit is not None:
        counted = [
            (each, needs.ravel()) for each, needs in needed if needs is not None and needs.any()
        ]
        columns = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in counted)])
        needs = np.concatenate([np.zeros(0), *(each for _, each in counted)])
        unit = max(limit, 1.0)
        builder.add_rows(np.zeros_like(columns), columns, needs / unit, upper=limit / unit, count=1)
    # The constant is part of the objective, so that the solver's relative gap refers to the total
    # cost.
    builder.add_variables(1, cost=constant, lower=1.0)
    return builder.model(), places, pairs


def _subtract_minimum(costs: Array) -> tuple[float, Array]:
    """Return (minimum, costs minus the minimum); the latter are 0 for forbidden entries. Raise
    InfeasibleError if all entries are forbidden.
    """
    least = float(costs.min())
    if math.isinf(least):
        raise all_forbidden_error()
    return least, np.where(np.isfinite(costs), costs - least, 0.0)


ROUNDS = 60
"""Maximum number of forward and backward sweeps over the dual."""
PROGRESS = 0.02
"""Minimum fraction of the gap between cost and bound that a forward and backward sweep must close
for further sweeps to run.
"""
SLACK = 1e-9
"""Relative rounding error of a sum of many costs."""
GAP_FRACTIONS = (0.3, 0.1, 0.03, 0.01, 0.0)
"""Thresholds for `keep_promising`, as fractions of the gap between the bound and the highest bound
of a configuration. They are tried in order while too many configurations remain.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ReducedModel:
    """A model with fewer configurations, and the choice and the bounds that were found while it was
    reduced. A choice gives each variable one configuration.
    """

    kept: tuple[Array, ...]
    """For each variable: the remaining configurations, ascending."""
    reach: tuple[Array, ...]
    """For each remaining configuration: a lower bound on the cost of all choices that contain it.
    """
    choice: tuple[int, ...]
    """The cheapest choice that was found or known. All its configurations remain, unless its cost
    exceeds the cutoff.
    """
    cost: float
    """The cost of `choice`."""
    bound: float
    """A lower bound on the cost of all choices."""
    removed_bound: float = np.inf
    """A lower bound on the cost of all choices that contain a removed configuration. Choices that
    cost more than `choice` are not considered.
    """

    @property
    def is_optimal(self) -> bool:
        """True if the bound proves that no choice is cheaper than `choice`, except for rounding
        errors.
        """
        return self.cost - self.bound <= SLACK * abs(self.cost)

    def optimal_assignment(self, model: MinSum) -> Assignment:
        """Return `choice` as an assignment that is proven optimal. `is_optimal` must be true."""
        return Assignment(self.choice, self.cost, self.cost, True, model.memory_of(self.choice))


def fix_by_reduced_cost(
    model: MinSum, most: float = 0, known: Sequence[int] = (), cutoff: float | None = None
) -> ReducedModel:
    """Remove configurations from a merged model (`merge_edges`) until at most `most` pairs of
    configurations remain on its edges, or the lower bound stops improving.

    A choice gives each variable one configuration. Let reach(c) be the lower bound on the cost of
    all choices that contain configuration c (`Dual.configuration_bounds`). Configuration c is
    removed if reach(c) exceeds a threshold, because no choice of at most that cost contains c. The
    threshold is `cutoff`, or, if it is None, the cost of the cheapest choice found so far,
    including `known`. Raise InfeasibleError if the arrays of costs show that all choices are
    forbidden.
    """
    part = Subproblem(model, all_configurations(model))
    choice = tuple(known)
    cost = float(model.cost_of(known)) if known else np.inf
    threshold = _add_slack(cost if cutoff is None else cutoff)
    previous_bound = -np.inf
    for _ in range(ROUNDS):
        if choice and part.dual.cells([len(keep) for keep in part.kept]) <= most:
            break
        for forward in (True, False):
            found_choice = part.sweep(forward)
            if (found_cost := float(model.cost_of(found_choice))) < cost or not choice:
                choice = found_choice
                cost = found_cost
        threshold = _add_slack(cost) if cutoff is None else threshold
        part.drop_above(threshold)
        bound = part.bound
        if cost - bound <= SLACK * abs(cost) or bound - previous_bound < PROGRESS * (
            cost - previous_bound
        ):
            break
        previous_bound = bound
    positions = part.within(threshold)
    reach = tuple(
        each[kept_positions] - part.dual.rounding
        for each, kept_positions in zip(part.dual.configuration_bounds, positions, strict=True)
    )
    return ReducedModel(tuple(part.at(positions)), reach, choice, cost, min(part.bound, cost))


def keep_promising(model: MinSum, found: ReducedModel, maximum_pairs: float) -> ReducedModel:
    """Return `found` with at most `maximum_pairs` pairs of configurations on edges.

    Each configuration has a lower bound on the cost of all choices that contain it. Configurations
    whose bound is above a threshold are removed, except those of `found.choice`. The threshold
    decreases as in `GAP_FRACTIONS`. If the lowest threshold leaves more pairs than `maximum_pairs`,
    these pairs are kept.
    """
    top = max(float(reach.max()) for reach in found.reach)
    for fraction in GAP_FRACTIONS:
        if _count_pairs(model, found.kept) <= maximum_pairs:
            break
        threshold = found.bound + fraction * max(0.0, top - found.bound)
        every = list(zip(found.kept, found.reach, found.choice, strict=True))
        stays = [(reach <= threshold) | (kept == number) for kept, reach, number in every]
        kept = tuple(each[stay] for each, stay in zip(found.kept, stays, strict=True))
        reach = tuple(each[stay] for each, stay in zip(found.reach, stays, strict=True))
        found = replace(found, kept=kept, reach=reach, removed_bound=threshold)
    return found


def _count_pairs(model: MinSum, kept: Sequence[Array]) -> int:
    """Return the number of pairs of configurations of all edges between variables with several
    remaining configurations.
    """
    sizes = [len(keep) for keep in kept]
    ends = ((sizes[edge.source], sizes[edge.target]) for edge in model.edges)
    return sum(
        source_size * target_size
        for source_size, target_size in ends
        if min(source_size, target_size) > 1
    )


def _add_slack(cost: float) -> float:
    """Return `cost` increased by the rounding error of a sum of many costs."""
    return cost + SLACK * abs(cost)


MAXIMUM_PAIRS = 50_000
"""Maximum number of pairs of configurations in an integer program without a memory limit."""
MAXIMUM_PAIRS_WITHIN_MEMORY = 10_000
"""Maximum number of pairs of configurations in an integer program with a memory limit, which takes
longer to solve.
"""


def cheapest_by_program(
    model: MinSum, seconds: float, most: float = MAXIMUM_PAIRS, solver: str = AUTO
) -> Assignment:
    """Return the cheapest choice (one configuration per variable) of a merged model
    (`merge_edges`), by an integer program with about `most` pairs of configurations.

    `solver` is the integer-program solver (see `milp.solve`), which runs for at most `seconds`. No
    program is solved if the dual bound equals the cost of a known choice. Raise InfeasibleError if
    all choices are forbidden.
    """
    reduced = fix_by_reduced_cost(model)
    if reduced.is_optimal:
        return reduced.optimal_assignment(model)
    reduced = keep_promising(model, reduced, most)
    known = _remaining_positions(reduced, reduced.choice)
    found = cheapest_choice(restrict(model, reduced.kept), seconds, known or (), solver=solver)
    bound = max(reduced.bound, min(float(found.bound), reduced.removed_bound))
    proven = found.proven and found.cost <= reduced.removed_bound
    return replace(
        found, choice=configurations_at(reduced.kept, found.choice), bound=bound, proven=proven
    )


def cheapest_within_memory(
    model: MinSum,
    limit: float,
    rate: float,
    cutoff: float,
    known: Sequence[int],
    seconds: float,
    solver: str = AUTO,
) -> Assignment:
    """Return the cheapest choice of a merged model (`merge_edges`) with at most `limit` bytes and a
    cost of at most `cutoff`. A choice gives each variable one configuration.

    Before the program is solved, configurations are removed by their reduced costs in the model in
    which each byte costs `rate`. The solver starts with the choice `known` if it is within the
    limit. Raise InfeasibleError if there is no choice within both limits, or if `solver` finds none
    within `seconds`.
    """
    with_byte_cost = add_memory_cost(model, rate)
    reduced = fix_by_reduced_cost(with_byte_cost, 0, known, cutoff + rate * limit)
    reduced = keep_promising(with_byte_cost, reduced, MAXIMUM_PAIRS_WITHIN_MEMORY)
    start = _remaining_positions(reduced, known) if model.memory_of(known) <= limit else None
    found = cheapest_choice(restrict(model, reduced.kept), seconds, start or (), limit, solver)
    removed_bound = reduced.removed_bound - rate * limit
    proven = found.proven and found.cost <= removed_bound
    bound = min(float(found.bound), removed_bound)
    return replace(
        found, choice=configurations_at(reduced.kept, found.choice), bound=bound, proven=proven
    )


def _remaining_positions(reduced: ReducedModel, choice: Sequence[int]) -> list[int] | None:
    """Return, for each variable, the position of its configuration in `choice` among its remaining
    configurations. Return None if one of these configurations was removed.
    """
    positions = [
        np.flatnonzero(configurations == number)
        for configurations, number in zip(reduced.kept, choice, strict=True)
    ]
    return [int(position[0]) for position in positions] if all(map(len, positions)) else None
