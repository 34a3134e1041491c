"""The tree's units in one line of blocks, and which stretches of the line are branches.

A stage of the search is a stretch of this line. Any stretch is convex, as the line is a topological order: so stages
may also end in the middle of one branch and begin in another, hold several branches, or the end of one and what joins
them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.passes.analysis.chain import Chain, choose_cuts, crossing_bytes
from autopipe.passes.placement.graphpipe.tree import Leaf, Series, Tree, bits, leaves
from autopipe.passes.placement.graphpipe.units import Units

_FEW = 32
"""Units of a graph so small that every fork of it is looked into."""


_FORKS = 32
"""Of a larger graph, forks with less than this part of all work are not looked into."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks `start` to `stop - 1`, each of which waits for the one before."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches, one after the other in the line, from block `start` to `stop - 1`; each is a line of its own."""

    branches: tuple[tuple[Region, ...], ...]
    start: int
    stop: int


Region = BlockRun | Fork


@dataclass(frozen=True, slots=True)
class BlockLine:
    """Blocks of nodes in a topological order, and its regions from the first to the last."""

    chain: Chain
    regions: tuple[Region, ...]
    needs: tuple[int, ...]
    """For each block the blocks that it reads from, as bits."""


def make_line(
    graph: Graph, units: Units, tree: Tree, seconds: NDArray[np.float64], limit: int, devices: int
) -> BlockLine:
    """The line of a tree, in at most about `limit` blocks; `seconds` weighs each node.

    But in a small graph, forks with less work than what each of `devices` gets, or tiny ones, become runs. Where there
    are more units, each run's units are joined where many bytes cross.
    """
    weights = np.array([seconds[list(nodes)].sum() for nodes in units.nodes])
    order = leaves(tree)
    light = float(weights.sum()) / min(devices, _FORKS) if len(order) > _FEW else -1.0
    drafts = _drafts(tree, weights, light)
    nodes = [node for unit in order for node in units.nodes[unit]]
    place = np.empty(len(nodes), dtype=np.int64)
    place[nodes] = np.arange(len(nodes))
    starts = np.cumsum([0, *(len(units.nodes[unit]) for unit in order)])
    crossing = crossing_bytes(graph, place)[starts[:-1]]
    share = limit / max(float(weights.sum()), 1e-30)
    cuts: list[int] = []
    regions = tuple(_placed(drafts, 0, crossing, weights[list(order)], share if len(order) > limit else np.inf, cuts))
    edges = [int(starts[cut]) for cut in (*cuts, len(order))]
    block_of = np.searchsorted(np.array(edges), place, side="right") - 1
    return BlockLine(Chain(tuple(nodes), tuple(edges), block_of), regions, _block_needs(units, block_of))


def _block_needs(units: Units, block_of: NDArray[np.int64]) -> tuple[int, ...]:
    blocks = [int(block_of[nodes[0]]) for nodes in units.nodes]
    needs = [0] * (max(blocks) + 1)
    for block, need in zip(blocks, units.needs, strict=True):
        for other in bits(need):
            needs[block] |= 1 << blocks[other]
    return tuple(need & ~(1 << block) for block, need in enumerate(needs))


Draft = int | tuple["list[Draft]", ...]
"""A range of units in a run, or the branches of a fork."""


def _drafts(tree: Tree, weights: NDArray[np.float64], light: float) -> list[Draft]:
    """The regions of a tree in numbers of units; forks of at most `light` work count as runs."""
    if isinstance(tree, Leaf):
        return [1]
    if isinstance(tree, Series):
        return list(itertools.chain.from_iterable(_drafts(part, weights, light) for part in tree.parts))
    units = leaves(tree)
    if weights[list(units)].sum() <= light:
        return [len(units)]
    return [tuple(_drafts(part, weights, light) for part in tree.parts)]


def _placed(
    drafts: list[Draft],
    place: int,
    crossing: NDArray[np.float64],
    weights: NDArray[np.float64],
    share: float,
    cuts: list[int],
) -> Iterator[Region]:
    """The regions of drafts that begin with unit `place` of the line; `cuts` grows by the first unit of each block."""
    for is_run, group in itertools.groupby(drafts, key=lambda draft: isinstance(draft, int)):
        if is_run:
            lengths = [length for length in group if isinstance(length, int)]
            begins = place + np.cumsum([0, *lengths])
            work = np.add.reduceat(weights, begins[:-1])[: len(lengths)]
            work[-1] = weights[begins[-2] : begins[-1]].sum()
            most = min(len(lengths), max(1, round(min(share * float(work.sum()), 1e9))))
            chosen = [
                0,
                *(
                    choose_cuts(crossing[begins[:-1]], work, most - 1)
                    if most < len(lengths)
                    else range(1, len(lengths))
                ),
            ]
            first = len(cuts)
            cuts.extend(int(begins[each]) for each in chosen)
            yield BlockRun(first, len(cuts))
            place = int(begins[-1])
            continue
        for fork in group:
            assert isinstance(fork, tuple)
            first = len(cuts)
            branches = []
            for branch in fork:
                branches.append(tuple(_placed(branch, place, crossing, weights, share, cuts)))
                place += _length(branch)
            yield Fork(tuple(branches), first, len(cuts))


def _length(drafts: list[Draft]) -> int:
    return sum(draft if isinstance(draft, int) else sum(map(_length, draft)) for draft in drafts)
