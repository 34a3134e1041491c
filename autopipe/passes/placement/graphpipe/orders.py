"""Other lines of the same units: stages may be stretches of one line and not of another.

A tree's own line keeps branches together. Where branches are uneven, a stage of the first halves of two of them can be
better, which is a stretch of a line that takes the units by depth; or one of another branch and what joins them, which
is a stretch where that branch comes last. In lines that tear branches apart every stage is taken to wait for the one
before, so memory counts as for a chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopipe.passes.placement.graphpipe.tree import Leaf, Parallel, Series, Tree, bits, leaves

FEW = 8
"""Units of a graph so small that many lines are looked at."""

_MOST_LINES = 64
"""Of each kind."""


def other_orders(tree: Tree, needs: Sequence[int], weights: Sequence[float]) -> Iterator[Tree]:
    """Trees whose leaves are the same units in other topological orders, the most promising first, each once.

    `needs` are the units that each reads from, as bits, and `weights` what each takes.
    """
    count = len(needs)
    few = count <= FEW
    seen = {_equal_branches(tree, weights)}
    for each in (_mirrored(tree), *(itertools.islice(_permuted(tree), _MOST_LINES) if few else ())):
        if _equal_branches(each, weights) not in seen:
            seen.add(_equal_branches(each, weights))
            yield each
    # The stretches of the tree's own order are those of its line.
    known = {leaves(tree)}
    every = itertools.islice(_extensions(needs, 0, ()), _MOST_LINES) if few else ()
    for order in (tuple(range(count)), tuple(_by_depth(needs, weights)), *every):
        if order not in known:
            known.add(order)
            yield Series(tuple(map(Leaf, order)))


def _equal_branches(tree: Tree, weights: Sequence[float]) -> object:
    """Equal for trees that differ in the order of equal branches alone."""
    if isinstance(tree, Leaf):
        return weights[tree.unit]
    return type(tree).__name__, tuple(_equal_branches(part, weights) for part in tree.parts)


def _mirrored(tree: Tree) -> Tree:
    """The last branch first."""
    if isinstance(tree, Leaf):
        return tree
    parts = tuple(map(_mirrored, tree.parts))
    return Series(parts) if isinstance(tree, Series) else Parallel(parts[::-1])


def _by_depth(needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The units by when they could be done, if each had a device of its own."""
    done: list[float] = []
    for need, weight in zip(needs, weights, strict=True):
        done.append(weight + max((done[other] for other in bits(need)), default=0.0))
    latest = [max((done[other] for other in bits(need)), default=0.0) for need in needs]
    # What takes no time is done when that is which it waits for: the unit's number keeps such units in order.
    return sorted(range(len(needs)), key=lambda unit: (done[unit], latest[unit], unit))


def _permuted(tree: Tree) -> Iterator[Tree]:
    """The tree with its branches in every order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    for parts in itertools.product(*(tuple(itertools.islice(_permuted(part), _MOST_LINES)) for part in tree.parts)):
        if isinstance(tree, Series):
            yield Series(parts)
        else:
            yield from map(Parallel, itertools.permutations(parts))


def _extensions(needs: Sequence[int], done: int, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every topological order."""
    if len(order) == len(needs):
        yield order
        return
    for unit, need in enumerate(needs):
        if not done >> unit & 1 and not need & ~done:
            yield from _extensions(needs, done | 1 << unit, (*order, unit))
