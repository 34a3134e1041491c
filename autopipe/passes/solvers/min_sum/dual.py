"""A lower bound by reparametrisation: sequential message passing (TRW-S: Kolmogorov 2006; SRMP: Kolmogorov 2015).

What an edge costs can be moved to its ends without changing any sum. A sweep visits nodes in order: each collects from
the edges behind it all that they surely cost, sets its own least aside as part of the bound, and hands the rest on in
equal shares to the edges ahead of it. On a chain one sweep forth and one back give the least cost of any choice with a
configuration exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np

from autopipe.passes.solvers.min_sum.blocks import ENTRIES, blocks
from autopipe.passes.solvers.min_sum.budget import CALLS
from autopipe.passes.solvers.min_sum.model import Array, MinSum

ROUNDING = 1e-11
"""Of all that is added up; each sum of two loses at most 1e-16."""


class Dual:
    """A model in float64 whose costs are moved about. Every configuration and edge left must be part of some choice
    without forbidden pairs of neighbours (`restriction.Support`)."""

    bound: float
    """No choice costs less, but for rounding."""
    reach: list[Array]
    """Of every node: no choice with this configuration costs less, but for rounding."""
    rounding: float
    """Rounding error of `bound` and `reach` at most."""

    def __init__(self, model: MinSum) -> None:
        """Takes a merged model."""
        floats: dict[int, Array] = {}
        self._costs = [costs.astype(np.float64) for costs in model.costs]
        self._matrices = [floats.setdefault(id(edge.costs), np.asarray(edge.costs, np.float64)) for edge in model.edges]
        self._ends = [(edge.source, edge.target) for edge in model.edges]
        self._out: list[list[int]] = [[] for _ in model.costs]
        self._into: list[list[int]] = [[] for _ in model.costs]
        for index, edge in enumerate(model.edges):
            self._out[edge.source].append(index)
            self._into[edge.target].append(index)
        least: dict[int, Array] = {}
        for matrix in self._matrices:
            if id(matrix) not in least:
                least[id(matrix)] = matrix.min(axis=1)
        self._to_source = [least[id(matrix)].copy() for matrix in self._matrices]
        self._to_target = [np.zeros(matrix.shape[1]) for matrix in self._matrices]
        parts = [costs.min() for costs in self._costs] + [costs.min() for costs in self._to_source]
        self.rounding = ROUNDING * float(np.abs(parts).sum())
        self.bound = 0.0
        rests = [self._set_aside(node) for node in range(len(self._costs))]
        self.reach = [rest + self.bound for rest in rests]

    @property
    def work(self) -> int:
        """Sums that a sweep compares, or could compare in its time."""
        return self.cells([len(costs) for costs in self._costs]) + CALLS * (len(self._ends) + len(self._costs))

    def cells(self, sizes: Sequence[int]) -> int:
        """Sums that a sweep compares when the nodes have these numbers of configurations."""
        return sum(sizes[source] * sizes[target] for source, target in self._ends)

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """Visit all nodes in order or backwards; the choice that every node made seeing the choices behind it."""
        chosen = [0] * len(self._costs)
        for node, behind, ahead in self._visits(forward):
            seen = self._costs[node] + sum(self._message(edge, not forward) for edge in ahead)
            for edge in behind:
                source, target = self._ends[edge]
                matrix = self._matrices[edge]
                seen = seen + (matrix[chosen[source]] if forward else matrix[:, chosen[target]])
            chosen[node] = int(seen.argmin())
            self._visit(node, behind, ahead, forward)
        return tuple(chosen)

    def tighten(self, forward: bool) -> None:
        """Visit all nodes as `sweep` does, for the bounds alone."""
        for node, behind, ahead in self._visits(forward):
            self._visit(node, behind, ahead, forward)

    def pairs(self) -> list[Array]:
        """For every edge a matrix: no choice with these two configurations costs less. Takes a sweep backwards."""
        reach = list(self._matrices)
        for node, behind, ahead in self._visits(forward=False):
            rest = self._visit(node, behind, ahead, forward=False)
            for edge in behind:
                moved = self._matrices[edge] - self._to_target[edge]
                reach[edge] = moved + (self.bound + rest - self._to_source[edge])[:, None]
        return reach

    def _visits(self, forward: bool) -> Iterator[tuple[int, list[int], list[int]]]:
        """Nodes, and their edges behind and ahead."""
        if forward:
            yield from zip(range(len(self._costs)), self._into, self._out, strict=True)
        else:
            yield from zip(reversed(range(len(self._costs))), self._out[::-1], self._into[::-1], strict=True)

    def _visit(self, node: int, behind: list[int], ahead: list[int], forward: bool) -> Array:
        """Collect, set aside and hand on; what each configuration had above the least."""
        for edge in behind:
            if forward:
                self._to_target[edge] = least_difference(self._matrices[edge], self._to_source[edge], 0)
            else:
                self._to_source[edge] = least_difference(self._matrices[edge], self._to_target[edge], 1)
        rest = self._set_aside(node)
        np.maximum(self.reach[node], rest + self.bound, out=self.reach[node])
        for edge in ahead:
            message = self._message(edge, not forward)
            message -= rest / max(len(ahead), len(behind))
        return rest

    def copy(self) -> Dual:
        """Another dual that begins where this one is."""
        other = copy.copy(self)
        other._matrices = list(self._matrices)
        other._costs, other.reach, other._to_source, other._to_target = (
            [vector.copy() for vector in vectors]
            for vectors in (self._costs, self.reach, self._to_source, self._to_target)
        )
        return other

    def restrict(self, kept: Sequence[Array]) -> None:
        """Keep these configurations of every node, ascending indices."""
        changed = [len(keep) < len(costs) for keep, costs in zip(kept, self._costs, strict=True)]
        for node, keep in enumerate(kept):
            if changed[node]:
                self._costs[node] = self._costs[node][keep]
                self.reach[node] = self.reach[node][keep]
        for edge, (source, target) in enumerate(self._ends):
            if changed[source] or changed[target]:
                self._matrices[edge] = self._matrices[edge].take(kept[source], 0).take(kept[target], 1)
                self._to_source[edge] = self._to_source[edge][kept[source]]
                self._to_target[edge] = self._to_target[edge][kept[target]]

    def _message(self, edge: int, to_target: bool) -> Array:
        return (self._to_target if to_target else self._to_source)[edge]

    def _set_aside(self, node: int) -> Array:
        """Move the least of all that is at the node to the bound; what remains of it, with its messages."""
        total = self._costs[node].copy()
        for edge in self._out[node]:
            total += self._to_source[edge]
        for edge in self._into[node]:
            total += self._to_target[edge]
        least = np.minimum.reduce(total)
        total -= least
        self._costs[node] -= least
        self.bound += float(least)
        return total


def least_difference(matrix: Array, vector: Array, axis: int) -> Array:
    """The least along `axis` of the matrix less the vector, which lies along it."""
    if matrix.size <= ENTRIES:
        difference = matrix - (vector if axis == 1 else vector[:, None])
        small: Array = np.minimum.reduce(difference, axis=axis)
        return small
    if axis == 1:
        least = np.empty(matrix.shape[0])
        for rows in blocks(matrix.shape[0], matrix.shape[1]):
            (matrix[rows] - vector).min(axis=1, out=least[rows])
        return least
    least = np.full(matrix.shape[1], np.inf)
    for rows in blocks(matrix.shape[0], matrix.shape[1]):
        np.minimum(least, (matrix[rows] - vector[rows, None]).min(axis=0), out=least)
    return least
