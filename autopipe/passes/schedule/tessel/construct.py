"""Steady states without a solver: an answer always, and a place to begin from.

A simple form of Rau, "Iterative modulo scheduling" (MICRO 1994): many orders are tried instead of taking blocks back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts, is_valid
from autopipe.passes.schedule.tessel.options import Budget
from autopipe.passes.schedule.tessel.placing import PlacementRule, Placing
from autopipe.passes.schedule.tessel.sequences import forward_order, outward_order
from autopipe.passes.schedule.tessel.tighten import tighten

_STEP = 1.04
"""Factor from one period that is tried to the next."""
_MOST_ORDERS = 32
"""Random orders of each kind that are tried at one period; fewer where there are many blocks."""
_HALVINGS = 4
"""Periods between the least and the best known that are tried with random orders."""


def construct(graph: BlockGraph, low: int, serial: Sequence[int], budget: Budget) -> PeriodicStarts:
    """A steady state of a period of `low` or more. `serial` is an order of one unit's blocks that fits memory."""
    best, placing = one_at_a_time(graph, serial), Placing(graph, budget)
    ways = _ways([tuple(serial), graph.order])
    period: float = low
    while period < best.period:
        best = _best_of(graph, placing, round(period), ways, budget) or best
        period *= _STEP
    best = tighten(graph, best, low)
    ways += _random_ways(graph, budget.options.seed)
    period, known = low, low
    for _ in range(1 + _HALVINGS):
        found = _best_of(graph, placing, period, ways, budget)
        if found is None:
            known = period
        elif (found.period, found.latency(graph)) < (best.period, best.latency(graph)):
            best = tighten(graph, found, low)
        period = (known + best.period) // 2
        if known in {best.period, period}:
            break
    return best


def one_at_a_time(graph: BlockGraph, serial: Sequence[int]) -> PeriodicStarts:
    """One block at a time on all devices together, and each unit after the one before."""
    starts, now = [0] * len(graph.blocks), 0
    for index in serial:
        block = graph.blocks[index]
        ends = (starts[other] + graph.blocks[other].time + block.delay(at) for at, other in enumerate(block.after))
        starts[index] = max(now, *ends, 0)
        now = starts[index] + block.time
    return PeriodicStarts(now, tuple(starts))


def _best_of(
    graph: BlockGraph, placing: Placing, period: int, ways: Sequence[PlacementRule], budget: Budget
) -> PeriodicStarts | None:
    """Of all steady states of this period that these ways lead to the one with the shortest way of a unit."""
    best: PeriodicStarts | None = None
    for way in ways:
        if budget.over:
            break
        found = placing.place(period, way)
        if found is not None and is_valid(graph, found):
            found = tighten(graph, found, period)
            if best is None or found.latency(graph) < best.latency(graph):
                best = found
    return best


def _random_ways(graph: BlockGraph, seed: int) -> list[PlacementRule]:
    draw = random.Random(seed)
    count = max(4, min(_MOST_ORDERS, 4000 // len(graph.blocks)))
    forward = [forward_order(graph, draw) for _ in range(count)]
    return _ways(forward + [outward_order(graph, draw) for _ in range(count)])


def _ways(orders: Sequence[tuple[int, ...]]) -> list[PlacementRule]:
    """All ways with these orders, each once."""
    return [PlacementRule(*way) for way in product(dict.fromkeys(orders), (False, True), (False, True))]
