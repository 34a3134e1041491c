"""The series-parallel tree of a graph's units.

Two units are in series where one waits for the other, directly or not. So a residual connection is no branch: what it
skips lies between its two ends anyway. Jeon et al., "GraphPipe" (2024), section 5, decompose the graph so that stages
of parallel parts can run at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopipe.passes.placement.graphpipe.ordering import least_ordering_cut


@dataclass(frozen=True, slots=True)
class Leaf:
    """One unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Series:
    """Parts of which each waits for all of those before it."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that have nothing to do with one another."""

    parts: tuple[Tree, ...]


Tree = Leaf | Series | Parallel


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The tree, and the regions that are not series-parallel: the smallest ones, each as its units, ascending.

    A stage graph that keeps to the tree treats such a region as if some of its units, which could run beside others,
    waited for them.
    """

    tree: Tree
    regions: tuple[tuple[int, ...], ...] = ()


def decompose(needs: Sequence[int], weights: Sequence[float]) -> Decomposition:
    """The tree of units that wait for those in `needs` (as bits), numbered topologically.

    `weights` say how much there is to lose where units of a region that is not series-parallel are put in an order.
    """
    relations = Relations(tuple(needs))
    regions: list[tuple[int, ...]] = []
    tree = _tree(relations, list(range(len(needs))), weights, regions, False)
    return Decomposition(tree, tuple(regions))


def leaves(tree: Tree) -> tuple[int, ...]:
    """The units of a tree, parts one after the other: a topological order."""
    if isinstance(tree, Leaf):
        return (tree.unit,)
    return tuple(itertools.chain.from_iterable(map(leaves, tree.parts)))


class Relations:
    """Transitive dependencies as bits."""

    def __init__(self, needs: tuple[int, ...]) -> None:
        self.needs = needs
        self.above: list[int] = []
        """All that a unit waits for."""
        self.linked = list(needs)
        """What a unit reads from and what reads from it."""
        for unit, need in enumerate(needs):
            above = need
            for other in bits(need):
                above |= self.above[other]
                self.linked[other] |= 1 << unit
            self.above.append(above)


def bits(mask: int) -> list[int]:
    """The places of the ones of a number, ascending."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _tree(
    relations: Relations, units: list[int], weights: Sequence[float], regions: list[tuple[int, ...]], inside: bool
) -> Tree:
    """The tree of some units, ascending; `inside` a region that is not series-parallel."""
    if len(units) == 1:
        return Leaf(units[0])
    runs = _in_series(relations, units)
    if len(runs) > 1:
        return _series(_tree(relations, run, weights, regions, inside) for run in runs)
    branches = _components(relations, units)
    if len(branches) > 1:
        return Parallel(tuple(_tree(relations, branch, weights, regions, inside) for branch in branches))
    if not inside:
        regions.append(tuple(units))
    first = least_ordering_cut(units, relations.above, weights)
    cut = set(first)
    rest = [unit for unit in units if unit not in cut]
    return _series(_tree(relations, each, weights, regions, True) for each in (first, rest))


def _series(parts: Iterable[Tree]) -> Series:
    return Series(tuple(itertools.chain.from_iterable(p.parts if isinstance(p, Series) else (p,) for p in parts)))


def _in_series(relations: Relations, units: list[int]) -> list[list[int]]:
    """The units cut wherever all that follow wait for all before. Such a cut parts any topological order in two."""
    before = [0]
    for unit in units:
        before.append(before[-1] | 1 << unit)
    shared = before[-1]
    cuts = [len(units)]
    for place in range(len(units) - 1, 0, -1):
        shared &= relations.above[units[place]]
        if not before[place] & ~shared:
            cuts.append(place)
    cuts.append(0)
    return [units[start:stop] for stop, start in itertools.pairwise(cuts)][::-1]


def _components(relations: Relations, units: list[int]) -> list[list[int]]:
    """Units that are linked with one another, directly or not; those with the first unit first."""
    left = sum(1 << unit for unit in units)
    found = []
    while left:
        reached, waiting = 0, left & -left
        while waiting:
            reached |= waiting
            new = 0
            for unit in bits(waiting):
                new |= relations.linked[unit]
            waiting = new & left & ~reached
        left &= ~reached
        found.append(bits(reached))
    return found
