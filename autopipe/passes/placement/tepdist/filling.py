"""Cones filled: for each strategy of a root, and of the root that it reads from, the best of what lies between them.

With one filling for each strategy of a root alone, a cone could not go along with what its operand offers; with one for
both ends, a choice for the roots costs what the best choice for everything around it does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.passes.placement.tepdist.cones import is_root
from autopipe.passes.solvers.min_sum import Edge, MinSum
from autopipe.passes.solvers.min_sum.model import Array, blocks, merged


@dataclass(frozen=True, slots=True, eq=False)
class Cones:
    """A model of roots alone; without a price for memory its least cost is that of the whole."""

    model: MinSum
    roots: tuple[int, ...]
    """Of the model's variables: those that they were."""
    filled: tuple[FilledVariable, ...]
    """In the order in which they were."""

    def expanded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice for all variables that goes with one for the roots."""
        chosen = dict(zip(self.roots, choice, strict=True))
        for each in reversed(self.filled):
            chosen[each.variable] = int(each.best[tuple(chosen[end] for end in each.ends)])
        return tuple(chosen[variable] for variable in range(len(chosen)))


@dataclass(frozen=True, slots=True, eq=False)
class FilledVariable:
    """A non-root, and its best configuration for each of its neighbours'."""

    variable: int
    ends: tuple[int, ...]
    """One or two."""
    best: Array
    """An axis for each of `ends`."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Cost of choices, and the bytes that they need."""

    costs: Array
    memory: Array

    @property
    def turned(self) -> Sums:
        """The same with both axes exchanged."""
        return Sums(self.costs.T, self.memory.T)


def fill_cones(model: MinSum, rate: float = 0.0) -> Cones:
    """`model` with its cones filled so that cost, and `rate` for each byte, are least."""
    roots = is_root(model)
    filler = _Filler.of(merged(model), rate)
    filled = tuple(filler.fill(variable) for variable in np.flatnonzero(~roots).tolist() if filler.around[variable])
    return Cones(*filler.left(), filled)


@dataclass(eq=False, slots=True)
class _Filler:
    """A model on its way; equal sums are formed once."""

    rate: float
    own: dict[int, Sums]
    around: dict[int, dict[int, Sums]]
    """Of every variable left: its neighbours, and sums [own configurations, theirs]."""
    known: dict[Hashable, tuple[tuple[Sums, ...], Sums, Array]] = field(default_factory=dict)
    """By what was added, which is held so that its place stays its own."""
    added: dict[Hashable, tuple[tuple[Sums, Sums], Sums]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: MinSum, rate: float) -> _Filler:
        """Begins with a merged model."""
        made: dict[Hashable, Sums] = {}

        def sums(costs: Array, memory: Array | None) -> Sums:
            key = id(costs), id(memory)
            if key not in made:
                made[key] = Sums(costs, np.zeros(costs.shape, np.int64) if memory is None else memory)
            return made[key]

        memory = model.memory or (None,) * len(model.costs)
        own = {place: sums(*each) for place, each in enumerate(zip(model.costs, memory, strict=True))}
        around: dict[int, dict[int, Sums]] = {place: {} for place in own}
        turned: dict[int, Sums] = {}
        for edge in model.edges:
            both = sums(edge.costs, edge.memory)
            around[edge.source][edge.target] = both
            around[edge.target][edge.source] = turned.setdefault(id(both), both.turned)
        return cls(rate, own, around)

    def fill(self, variable: int) -> FilledVariable:
        """Take a variable of one or two neighbours away."""
        ends = tuple(sorted(self.around[variable]))
        parts = (self.own.pop(variable), *(self.around[variable][end] for end in ends))
        del self.around[variable]
        for end in ends:
            del self.around[end][variable]
        key = tuple(map(id, parts))
        if key not in self.known:
            self.known[key] = (parts, *_least(parts, self.rate))
        _, least, best = self.known[key]
        if len(ends) == 1:
            self.own[ends[0]] = self._sum(self.own[ends[0]], least)
        else:
            self._link(ends[0], ends[1], least)
        return FilledVariable(variable, ends, best)

    def left(self) -> tuple[MinSum, tuple[int, ...]]:
        """The remaining model, and its variables."""
        roots = tuple(self.own)
        number = {root: place for place, root in enumerate(roots)}
        edges = tuple(
            Edge(number[one], number[other], sums.costs, sums.memory)
            for one in roots
            for other, sums in self.around[one].items()
            if one < other
        )
        costs, memory = (tuple(getattr(each, name) for each in self.own.values()) for name in ("costs", "memory"))
        return MinSum(costs, edges, memory), roots

    def _link(self, one: int, other: int, sums: Sums) -> None:
        if other in self.around[one]:
            sums = self._sum(self.around[one][other], sums)
        self.around[one][other] = sums
        self.around[other][one] = self._turned(sums)

    def _turned(self, sums: Sums) -> Sums:
        key = "turned", id(sums)
        if key not in self.added:
            self.added[key] = (sums, sums), sums.turned
        return self.added[key][1]

    def _sum(self, one: Sums, other: Sums) -> Sums:
        key = id(one), id(other)
        if key not in self.added:
            self.added[key] = (one, other), Sums(one.costs + other.costs, one.memory + other.memory)
        return self.added[key][1]


def _least(parts: Sequence[Sums], rate: float) -> tuple[Sums, Array]:
    """Of a variable's own sums and those with its one or two ends the least, and which configuration that is."""
    own, *ends = parts
    if len(ends) == 1:
        ends = [ends[0], Sums(np.zeros((len(own.costs), 1)), np.zeros((len(own.costs), 1), np.int64))]
    first, second = ends
    shape = first.costs.shape[1], second.costs.shape[1]
    costs, memory, best = np.empty(shape), np.empty(shape, np.int64), np.empty(shape, np.int64)
    columns = np.arange(shape[1])
    behind = own.costs[:, None] + second.costs, own.memory[:, None] + second.memory
    priced = behind[0] + rate * behind[1]
    ahead = first.costs + rate * first.memory
    for rows in blocks(shape[0], priced.size):
        best[rows] = (ahead[:, rows].T[:, :, None] + priced[None]).argmin(axis=1)
    which = np.arange(shape[0])[:, None]
    costs[:] = first.costs.T[which, best] + behind[0][best, columns]
    memory[:] = first.memory.T[which, best] + behind[1][best, columns]
    if len(parts) == 2:
        return Sums(costs[:, 0], memory[:, 0]), best[:, 0]
    return Sums(costs, memory), best
