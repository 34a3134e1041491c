"""Steady states without a solver: an answer always, and a place to begin from.

The blocks of one unit are put one after the other into a gap of the period, without taking any back; a longer period
always leads to an answer. A simple form of Rau, "Iterative modulo scheduling" (MICRO 1994).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import product

from autopipe.ir.blocks import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import Cyclic, is_valid
from autopipe.passes.schedule.tessel.options import Budget
from autopipe.passes.schedule.tessel.tighten import tighten

_STEP = 1.04
"""Factor from one period that is tried to the next."""
_MOST_ORDERS = 32
"""Random orders that are tried at one period; fewer where there are many blocks."""
_HALVINGS = 4
"""Periods between the least and the best known that are tried with random orders."""


def construct(graph: BlockGraph, low: int, serial: Sequence[int], budget: Budget) -> Cyclic:
    """A steady state of a period of `low` or more. `serial` is an order of one unit's blocks that fits memory."""
    best = one_at_a_time(graph, serial)
    orders, neighbours = list(dict.fromkeys((tuple(serial), graph.order))), _neighbours(graph)
    period: float = low
    while period < best.period:
        best = _best_of(graph, neighbours, round(period), orders, budget) or best
        period *= _STEP
    best = tighten(graph, best, low)
    orders += _random_orders(graph, budget.options.seed)
    period, known = low, low
    for _ in range(1 + _HALVINGS):
        found = _best_of(graph, neighbours, period, orders, budget)
        if found is None:
            known = period
        elif (found.period, found.latency(graph)) < (best.period, best.latency(graph)):
            best = tighten(graph, found, low)
        period = (known + best.period) // 2
        if known in (best.period, period):
            break
    return best


def _best_of(
    graph: BlockGraph, neighbours: list[list[int]], period: int, orders: Sequence[Sequence[int]], budget: Budget
) -> Cyclic | None:
    """Of all steady states of this period that these orders lead to the one with the shortest way of a unit."""
    best: Cyclic | None = None
    for order in orders:
        for reserve, touch in product((False, True), repeat=2):
            if budget.over:
                return best
            found = _place(graph, neighbours, period, order, reserve, touch)
            if found is not None and is_valid(graph, found):
                found = tighten(graph, found, period)
                if best is None or found.latency(graph) < best.latency(graph):
                    best = found
    return best


def _random_orders(graph: BlockGraph, seed: int) -> list[tuple[int, ...]]:
    """Different orders of the blocks of a unit, each after all that it waits for."""
    draw = random.Random(seed)
    following: list[list[int]] = [[] for _ in graph.blocks]
    for index, block in enumerate(graph.blocks):
        for other in set(block.after):
            following[other].append(index)
    orders = []
    for _ in range(max(4, min(_MOST_ORDERS, 4000 // len(graph.blocks)))):
        rank = [draw.random() for _ in graph.blocks]
        waits = [len(set(block.after)) for block in graph.blocks]
        ready = [(rank[index], index) for index, count in enumerate(waits) if count == 0]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            order.append(heapq.heappop(ready)[1])
            for other in following[order[-1]]:
                waits[other] -= 1
                if waits[other] == 0:
                    heapq.heappush(ready, (rank[other], other))
        orders.append(tuple(order))
    return list(dict.fromkeys(orders))


def one_at_a_time(graph: BlockGraph, serial: Sequence[int]) -> Cyclic:
    """One block at a time on all devices together, and each unit after the one before."""
    starts, now = [0] * len(graph.blocks), 0
    for index in serial:
        starts[index] = max(now, _ready(graph, starts, index))
        now = starts[index] + graph.blocks[index].time
    return Cyclic(now, tuple(starts))


def _neighbours(graph: BlockGraph) -> list[list[int]]:
    """For each block those that share a device with it."""
    sets = [set(block.devices) for block in graph.blocks]
    count = range(len(sets))
    return [[other for other in count if other != index and sets[other] & sets[index]] for index in count]


def _ready(graph: BlockGraph, starts: Sequence[int], index: int) -> int:
    """When all that a block waits for is there."""
    block = graph.blocks[index]
    ends = (starts[other] + graph.blocks[other].time + block.delay(at) for at, other in enumerate(block.after))
    return max(ends, default=0)


def _place(
    graph: BlockGraph, neighbours: list[list[int]], period: int, order: Sequence[int], reserve: bool, touch: bool
) -> Cyclic | None:
    """Each block in turn in the first gap of the period that holds it on all its devices.

    With `reserve`, the blocks on most devices have their places beforehand, one behind the other; with `touch`, blocks
    stand against a neighbour, so that gaps stay whole.
    """
    starts = [0] * len(graph.blocks)
    phases = _reserved(graph, order) if reserve else {}
    for index in order:
        ready = _ready(graph, starts, index)
        if index in phases:
            starts[index] = ready + (phases[index] - ready) % period
            continue
        start = _first_gap(
            graph, {each: phases[each] for each in neighbours[index] if each in phases}, index, ready, period, touch
        )
        if start is None:
            return None
        starts[index], phases[index] = start, start % period
    return Cyclic(period, tuple(starts))


def _reserved(graph: BlockGraph, order: Sequence[int]) -> dict[int, int]:
    """Phases of the blocks on most devices."""
    most, phases, end = max(len(block.devices) for block in graph.blocks), {}, 0
    for index in order:
        if 1 < most == len(graph.blocks[index].devices):
            phases[index] = end
            end += graph.blocks[index].time
    return phases


def _first_gap(
    graph: BlockGraph, phases: dict[int, int], index: int, ready: int, period: int, touch: bool
) -> int | None:
    """The first start of a block, ready or later, at which it overlaps none of its neighbours in any period."""
    time = graph.blocks[index].time
    if time > period:
        return None
    waits = {(phase + graph.blocks[other].time - ready) % period for other, phase in phases.items()}
    if touch:
        waits |= {(phase - time - ready) % period for phase in phases.values()}
    if not touch or not phases:
        waits.add(0)
    for wait in sorted(waits):
        gaps = ((other, (phase - ready - wait) % period) for other, phase in phases.items())
        if all(gap >= time and period - gap >= graph.blocks[other].time for other, gap in gaps):
            return ready + wait
    return None
