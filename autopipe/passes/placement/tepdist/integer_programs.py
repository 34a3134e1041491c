"""A min-sum model as one integer linear program, made small before it is written.

The dual of the program's relaxation (`min_sum.branch_and_bound.Dual`) says of each configuration
what a choice with it costs at least; those above a choice that is known are dropped, as solvers of
integer programs do by reduced costs. Where that is not enough, only the most promising are kept,
and what was left out bounds what is proven.
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
    chosen,
    conditioned,
    everything,
    no_choice,
    priced,
    restricted,
)
from autopipe.passes.solvers.pulp_client import AUTO

CLOSE = 1e-4  # Gap that is none, within a memory limit.
# Of the search within a memory limit, whose relaxation says little: programs are done or stuck by
# then.
NODES = 50
PATIENCE_S = 15.0  # For one program within a memory limit.
SAME = 1e-9  # Gap that is rounding.
ROUNDING = 1e-6  # Share of a memory limit by which a solver may miss it.


def least_choice(
    model: MinSum,
    seconds: float,
    known: Sequence[int] = (),
    limit: float | None = None,
    solver: str = AUTO,
) -> Assignment:
    """The best choice of a merged model by one program, within `limit` bytes where that is given.
    `known` is one that fits. Of the time given the best that is found by then is the answer; within
    a limit the search ends at a gap of `CLOSE`, or at a limit of nodes. Raises InfeasibleError
    where there is none, or none was found in time and none is known.
    """
    answer = _solved(model, seconds, known, limit, solver)
    if limit is not None and answer.memory > limit:
        # The solver took the limit for kept, which it missed by its rounding.
        stricter = _solved(model, seconds, known, limit * (1 - ROUNDING), solver)
        answer = replace(stricter, bound=min(answer.bound, stricter.bound), proven=False)
    return answer


def _solved(
    model: MinSum, seconds: float, known: Sequence[int], limit: float | None, solver: str
) -> Assignment:
    program, places, pairs = _program(conditioned(model), limit)
    start = None
    if known:
        start = program.lower.copy()
        for columns, number in zip(places, known, strict=True):
            start[columns[number]] = 1.0
        for edge, columns in pairs:
            start[columns[known[edge.source], known[edge.target]]] = 1.0
    if limit is None:
        found = milp.solve(program, seconds, 0.0, start, None, solver)
    else:
        found = milp.solve(program, min(seconds, PATIENCE_S), CLOSE, start, NODES, solver)
    if not found.found:
        raise InfeasibleError(f"integer program of splits: {found.status.value}")
    choice = tuple(int(found.values[columns].argmax()) for columns in places)
    cost = model.cost_of(choice)
    memory = model.memory_of(choice)
    proven = found.proven and (limit is None or found.gap <= SAME)
    bound = cost if proven else min(float(cost), found.bound)
    return Assignment(choice, cost, bound, proven, memory, limit is None or memory <= limit)


def _program(
    model: MinSum, limit: float | None
) -> tuple[milp.Model, list[Array], list[tuple[Edge, Array]]]:
    """The program of a model without edges at variables of one configuration; with a binary a
    configuration of each variable, and one a pair of them on each edge (-1 where it is forbidden).

    With x[v, i] for "variable v has configuration i" and y[e, i, j] for "the ends of edge e have i
    and j":

        minimise    sum of costs[v][i] x[v, i]  +  sum of costs[e][i, j] y[e, i, j]
        subject to  sum over i of x[v, i] = 1                     one configuration a variable
                    sum over j of y[e, i, j] = x[source, i]       the pairs of an edge add up, along either side,
                    sum over i of y[e, i, j] = x[target, j]       to what its ends choose
                    sum of memory x + sum of memory y <= limit    where there is one

    Pairs need not be declared whole: they are, where their ends' are. Forbidden ones are left out.
    Costs are counted from the least of their array, so that the relaxation is scaled well; a
    variable fixed at 1 costs the sum of these. Raises InfeasibleError where all of a variable or an
    edge is forbidden.
    """
    builder = milp.Builder()
    constant = 0.0
    places: list[Array] = []
    pairs: list[tuple[Edge, Array]] = []
    needed: list[tuple[Array, Array | None]] = []
    for costs, needs in zip(model.costs, model.node_memory, strict=True):
        least, own = _above_least(costs)
        constant += least
        columns = builder.add_variables(len(own), cost=own, upper=np.isfinite(costs))
        builder.add_rows(np.zeros_like(columns), columns, lower=1, upper=1)
        places.append(columns)
        needed.append((columns, needs))
    for edge in model.edges:
        least, own = _above_least(edge.costs)
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
    if limit is not None:  # In shares of the limit.
        counted = [
            (each, needs.ravel()) for each, needs in needed if needs is not None and needs.any()
        ]
        columns = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in counted)])
        needs = np.concatenate([np.zeros(0), *(each for _, each in counted)])
        unit = max(limit, 1.0)
        builder.add_rows(np.zeros_like(columns), columns, needs / unit, upper=limit / unit, count=1)
    # Gaps are shares of all that is paid.
    builder.add_variables(1, cost=constant, lower=1.0)
    return builder.model(), places, pairs


def _above_least(costs: Array) -> tuple[float, Array]:
    """The least of some costs, and what each is above it; 0 for forbidden ones."""
    least = float(costs.min())
    if math.isinf(least):
        raise no_choice()
    return least, np.where(np.isfinite(costs), costs - least, 0.0)


ROUNDS = 60  # Sweeps forth and back at most.
PROGRESS = 0.02  # They go on while one of each closes this share of the gap.
SLACK = 1e-9  # Of a cost: what rounding may do to a sum of many.
SHARES = (
    0.3,
    0.1,
    0.03,
    0.01,
    0.0,
)  # Of the gap: thresholds that are tried where too much is left.


@dataclass(frozen=True, slots=True, eq=False)
class ReducedModel:
    """A model with fewer configurations."""

    kept: tuple[Array, ...]  # Of every variable, ascending.
    reach: tuple[Array, ...]  # Of each of these: no choice with it costs less.
    choice: tuple[int, ...]
    """The best that was met, or known before; among what is kept, unless it costs more than the
    cutoff.
    """
    cost: float  # Of that choice.
    bound: float  # No choice costs less.
    left_out: float = np.inf
    """No choice costs less that has another configuration, but for those that cost more than
    `choice`.
    """

    @property
    def is_met(self) -> bool:
        """True if no choice costs less than the one that was met."""
        return self.cost - self.bound <= SLACK * abs(self.cost)

    def answer(self, model: MinSum) -> Assignment:
        """The choice that was met, where none costs less."""
        return Assignment(self.choice, self.cost, self.cost, True, model.memory_of(self.choice))


def fix_by_reduced_cost(
    model: MinSum, most: float = 0, known: Sequence[int] = (), cutoff: float | None = None
) -> ReducedModel:
    """Reduce a merged model until it has at most `most` pairs of configurations, or bounds get no
    better. A choice with a configuration costs no less than its reach (`Dual.reach`); so one whose
    reach is above a cost that is known is in no choice of that cost. A configuration stays if it
    may be in a choice that costs no more than `cutoff`; or, where none is given, than the best
    choice that is met or `known`. Raises InfeasibleError where every choice is forbidden, as far as
    pairs show it.
    """
    part = Subproblem(model, everything(model))
    choice = tuple(known)
    cost = float(model.cost_of(known)) if known else np.inf
    top = _at_most(cost if cutoff is None else cutoff)
    before = -np.inf
    for _ in range(ROUNDS):
        if choice and part.dual.cells([len(keep) for keep in part.kept]) <= most:
            break
        for forward in (True, False):
            met = part.sweep(forward)
            if (cost_met := float(model.cost_of(met))) < cost or not choice:
                choice = met
                cost = cost_met
        top = _at_most(cost) if cutoff is None else top
        part.narrow(top)
        bound = part.bound
        if cost - bound <= SLACK * abs(cost) or bound - before < PROGRESS * (cost - before):
            break
        before = bound
    positions = part.within(top)
    reach = tuple(
        each[places] - part.dual.rounding
        for each, places in zip(part.dual.reach, positions, strict=True)
    )
    return ReducedModel(tuple(part.at(positions)), reach, choice, cost, min(part.bound, cost))


def promising(model: MinSum, found: ReducedModel, most: float) -> ReducedModel:
    """The same with at most `most` pairs of configurations, or with no more than promise the least,
    and its choice.
    """
    top = max(float(reach.max()) for reach in found.reach)
    for share in SHARES:
        if _pairs(model, found.kept) <= most:
            break
        threshold = found.bound + share * max(0.0, top - found.bound)
        every = list(zip(found.kept, found.reach, found.choice, strict=True))
        stays = [(reach <= threshold) | (kept == number) for kept, reach, number in every]
        kept = tuple(each[stay] for each, stay in zip(found.kept, stays, strict=True))
        reach = tuple(each[stay] for each, stay in zip(found.reach, stays, strict=True))
        found = replace(found, kept=kept, reach=reach, left_out=threshold)
    return found


def _pairs(model: MinSum, kept: Sequence[Array]) -> int:
    """Pairs of configurations on edges whose ends have a choice."""
    sizes = [len(keep) for keep in kept]
    ends = ((sizes[edge.source], sizes[edge.target]) for edge in model.edges)
    return sum(one * other for one, other in ends if min(one, other) > 1)


def _at_most(cost: float) -> float:
    return cost + SLACK * abs(cost)


MOST_PAIRS = 50_000  # Of configurations on edges: what an integer program may have.
MOST_PAIRS_WITHIN = 10_000  # The same within a memory limit, where programs take longest.


def least_by_program(
    model: MinSum, seconds: float, most: float = MOST_PAIRS, solver: str = AUTO
) -> Assignment:
    """Return the choice of minimum cost of a merged model, by an integer program of about `most`
    pairs of configurations, solved by `solver` (`milp.solve`).

    No program is solved if the dual bound of the relaxation equals the cost of a known choice.
    Raises InfeasibleError if every choice is forbidden.
    """
    left = fix_by_reduced_cost(model)
    if left.is_met:
        return left.answer(model)
    left = promising(model, left, most)
    known = _places(left, left.choice)
    found = least_choice(restricted(model, left.kept), seconds, known or (), solver=solver)
    bound = max(left.bound, min(float(found.bound), left.left_out))
    proven = found.proven and found.cost <= left.left_out
    return replace(found, choice=chosen(left.kept, found.choice), bound=bound, proven=proven)


def least_within(
    model: MinSum,
    limit: float,
    rate: float,
    cutoff: float,
    known: Sequence[int],
    seconds: float,
    solver: str = AUTO,
) -> Assignment:
    """Return the choice of minimum cost of a merged model among those of at most `limit` bytes and
    cost `cutoff`.

    Configurations are left out of the program by their reduced costs at `rate` per byte. The search
    starts from `known` if that choice is within the limit. Raises InfeasibleError if there is no
    such choice, or if `solver` finds none in time.
    """
    at_price = priced(model, rate)
    left = fix_by_reduced_cost(at_price, 0, known, cutoff + rate * limit)
    left = promising(at_price, left, MOST_PAIRS_WITHIN)
    start = _places(left, known) if model.memory_of(known) <= limit else None
    found = least_choice(restricted(model, left.kept), seconds, start or (), limit, solver)
    left_out = left.left_out - rate * limit
    proven = found.proven and found.cost <= left_out
    bound = min(float(found.bound), left_out)
    return replace(found, choice=chosen(left.kept, found.choice), bound=bound, proven=proven)


def _places(left: ReducedModel, choice: Sequence[int]) -> list[int] | None:
    """Where a choice is among what is left; None where a part of it is not."""
    places = [
        np.flatnonzero(keep == number) for keep, number in zip(left.kept, choice, strict=True)
    ]
    return [int(place[0]) for place in places] if all(map(len, places)) else None
