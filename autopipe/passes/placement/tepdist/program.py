"""A min-sum model as one integer linear program: a binary a configuration, and one a pair of them on an edge.

One configuration a variable; the pairs of an edge add up, along either side, to what its ends choose. Pairs need not be
declared whole: they are, where their ends' are. Forbidden ones are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers import milp
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import Array, conditioned

CLOSE = 1e-4
"""Gap that is none, within a memory limit."""
NODES = 50
"""Of the search within a memory limit, whose relaxation says little: programs are done or stuck by then."""
PATIENCE_S = 15.0
"""For one program within a memory limit."""
SAME = 1e-9
"""Gap that is rounding."""
ROUNDING = 1e-6
"""Share of a memory limit by which a solver may miss it."""


@dataclass(frozen=True, slots=True)
class Programs:
    """How integer programs are solved."""

    solver: milp.SolverName = "auto"
    seconds: float = 60.0
    """For each; the best that is found by then is the answer."""

    def least(self, model: MinSum, known: Sequence[int] = (), limit: float | None = None) -> Assignment:
        """The best choice of a merged model, within `limit` bytes where that is given; `known` is one that fits.

        Within a limit the search ends at a gap of `CLOSE`, or at a limit of nodes. Raises InfeasibleError where there
        is none, or none was found in time and none is known.
        """
        answer = self._solved(model, known, limit)
        if limit is not None and answer.memory > limit:
            # The solver took the limit for kept, which it missed by its rounding.
            stricter = self._solved(model, known, limit * (1 - ROUNDING))
            answer = replace(stricter, bound=min(answer.bound, stricter.bound), proven=False)
        return answer

    def _solved(self, model: MinSum, known: Sequence[int], limit: float | None) -> Assignment:
        program = _Program.of(model, limit)
        start = program.values(known) if known else None
        gap, nodes = (0.0, None) if limit is None else (CLOSE, NODES)
        seconds = self.seconds if limit is None else min(self.seconds, PATIENCE_S)
        found = milp.solve(program.integer, seconds, gap, start, self.solver, nodes)
        if not found.found:
            raise InfeasibleError(f"integer program of splits: {found.status.value}")
        choice = program.choice(found.values)
        cost = model.cost_of(choice)
        proven = found.proven and (limit is None or found.gap <= SAME)
        bound = cost if proven else min(float(cost), found.bound)
        memory = model.memory_of(choice)
        return Assignment(choice, cost, bound, proven, memory, limit is None or memory <= limit)


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """An integer program, and where in it a model's choices are."""

    model: MinSum
    """With no edges at variables of one configuration."""
    integer: milp.Model
    places: tuple[Array, ...]
    """Of every variable: its binaries."""
    pairs: tuple[Array, ...]
    """Of every edge: its binaries, -1 where a pair is forbidden."""

    @classmethod
    def of(cls, model: MinSum, limit: float | None) -> _Program:
        """The program of a merged model. Raises InfeasibleError where all of a variable or an edge is forbidden."""
        model = conditioned(model)
        builder = milp.Builder()
        constant = 0.0
        places, pairs, bytes_ = [], [], []
        memory = model.memory or (None,) * len(model.costs)
        for costs, needs in zip(model.costs, memory, strict=True):
            least, own = _above_least(costs)
            constant += least
            columns = builder.add_variables(len(own), cost=own, upper=np.isfinite(costs))
            builder.add_rows(np.zeros_like(columns), columns, lower=1, upper=1)
            places.append(columns)
            bytes_.append((columns, needs))
        for edge in model.edges:
            least, own = _above_least(edge.costs)
            constant += least
            allowed = np.isfinite(edge.costs)
            columns = np.full(own.shape, -1)
            columns[allowed] = builder.add_variables(int(allowed.sum()), cost=own[allowed], integral=False)
            for end, axis in ((edge.source, 0), (edge.target, 1)):
                row = np.nonzero(allowed)[axis]
                sides = np.arange(len(places[end]))
                builder.add_rows(
                    np.concatenate((row, sides)),
                    np.concatenate((columns[allowed], places[end])),
                    np.concatenate((np.ones(len(row)), -np.ones(len(sides)))),
                    lower=0,
                    upper=0,
                )
            pairs.append(columns)
            bytes_.append((columns[allowed], None if edge.memory is None else edge.memory[allowed]))
        if limit is not None:
            _limit(builder, bytes_, limit)
        # Gaps are shares of all that is paid.
        builder.add_variables(1, cost=constant, lower=1.0)
        return cls(model, builder.model(), tuple(places), tuple(pairs))

    def values(self, choice: Sequence[int]) -> Array:
        """The program's variables at a choice."""
        found = self.integer.lower.copy()
        for columns, number in zip(self.places, choice, strict=True):
            found[columns[number]] = 1.0
        for edge, columns in zip(self.model.edges, self.pairs, strict=True):
            found[columns[choice[edge.source], choice[edge.target]]] = 1.0
        return found

    def choice(self, values: Array) -> tuple[int, ...]:
        """The choice at the program's variables."""
        return tuple(int(values[columns].argmax()) for columns in self.places)


def _above_least(costs: Array) -> tuple[float, Array]:
    """The least of some costs, and what each is above it; 0 for forbidden ones."""
    least = float(costs.min())
    if math.isinf(least):
        raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
    return least, np.where(np.isfinite(costs), costs - least, 0.0)


def _limit(builder: milp.Builder, parts: Sequence[tuple[Array, Array | None]], limit: float) -> None:
    """One row: the bytes of all that is chosen, in shares of the limit."""
    known = [(columns, needs) for columns, needs in parts if needs is not None and needs.any()]
    columns = np.concatenate([np.zeros(0, np.int64), *(each for each, _ in known)])
    needs = np.concatenate([np.zeros(0), *(each.ravel() for _, each in known)])
    builder.add_rows(np.zeros_like(columns), columns, needs / max(limit, 1.0), upper=limit / max(limit, 1.0), count=1)
