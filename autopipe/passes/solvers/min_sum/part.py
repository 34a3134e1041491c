"""A part of the search: for each node, the configurations that may still be in a better choice than the best known."""

from __future__ import annotations

import copy
from contextlib import suppress

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.dual import Dual
from autopipe.passes.solvers.min_sum.model import Array, MinSum
from autopipe.passes.solvers.min_sum.ordering import neighbours
from autopipe.passes.solvers.min_sum.restriction import Kept, Support, chosen, restricted


class Subproblem:
    """Configurations of a merged model, and a dual that knows no others."""

    kept: Kept

    def __init__(self, model: MinSum, kept: Kept) -> None:
        """Begins with what is kept. Raises InfeasibleError where every choice is forbidden, as far as pairs show it."""
        self._support = Support(model)
        self.kept = self._support.of(kept)
        self.around = neighbours(model)
        self.dual = Dual(restricted(model, self.kept))

    @property
    def bound(self) -> float:
        """No choice in the part costs less."""
        return max(self.dual.bound, *(float(reach.min()) for reach in self.dual.reach)) - self.dual.rounding

    @property
    def top(self) -> float:
        """The highest bound of a configuration."""
        return max(float(reach.max()) for reach in self.dual.reach)

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """One sweep of the dual; the choice it came upon."""
        return chosen(self.kept, self.dual.sweep(forward))

    def within(self, threshold: float) -> list[Array]:
        """Positions of the configurations that may be in a choice which costs no more than this."""
        return [np.flatnonzero(reach <= threshold + self.dual.rounding) for reach in self.dual.reach]

    def at(self, positions: Kept) -> list[Array]:
        """The configurations at these positions."""
        return [keep[places] for keep, places in zip(self.kept, positions, strict=True)]

    def narrow(self, threshold: float) -> None:
        """Drop configurations that are in no choice which costs as little, once that halves the work of a sweep.

        Raises InfeasibleError where there is no such choice, as far as bounds and neighbours show it.
        """
        positions = self.within(threshold)
        sizes = [len(places) for places in positions]
        if not all(sizes):
            raise InfeasibleError("no choice costs as little")
        if 2 * self.dual.cells(sizes) < self.dual.cells([len(keep) for keep in self.kept]):
            self._keep(positions)

    def _keep(self, positions: Kept) -> None:
        """Drop all others, and those that have no neighbour left. Raises InfeasibleError where a node has none left."""
        kept = self._support.of(self.at(positions))
        self.dual.restrict([np.searchsorted(old, new) for old, new in zip(self.kept, kept, strict=True)])
        self.kept = kept

    def cut(self, positions: Kept) -> Subproblem:
        """Another part, of the configurations at these positions; raises as `narrow` does."""
        part = copy.copy(self)
        part.dual = self.dual.copy()
        part._keep(positions)
        return part

    def halves(self) -> list[Subproblem]:
        """The part cut in two at the node that most others depend on, cheaper configurations and dearer ones.

        None where only one choice was left, which a sweep has come upon.
        """
        open_nodes = {node for node, keep in enumerate(self.kept) if len(keep) > 1}
        if not open_nodes:
            return []
        node = max(open_nodes, key=lambda n: len(self.kept[n]) ** 0.5 * (1 + len(self.around[n] & open_nodes)))
        cheapest = np.argsort(self.dual.reach[node], kind="stable")
        middle = len(cheapest) // 2
        parts = []
        for places in (cheapest[:middle], cheapest[middle:]):
            positions = [np.arange(len(keep)) for keep in self.kept]
            positions[node] = np.sort(places)
            with suppress(InfeasibleError):
                parts.append(self.cut(positions))
        return parts
