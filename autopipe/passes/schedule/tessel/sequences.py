"""Orders in which the blocks of a unit may be put into a period."""

from __future__ import annotations

import heapq
import random

from autopipe.ir.block_schedule import BlockGraph


def following(graph: BlockGraph) -> list[list[int]]:
    """For each block those that wait for it."""
    found: list[list[int]] = [[] for _ in graph.blocks]
    for index, block in enumerate(graph.blocks):
        for other in set(block.after):
            found[other].append(index)
    return found


def forward_order(graph: BlockGraph, draw: random.Random) -> tuple[int, ...]:
    """Any order in which each block comes after all that it waits for."""
    behind, rank = following(graph), [draw.random() for _ in graph.blocks]
    waits = [len(set(block.after)) for block in graph.blocks]
    ready = [(rank[index], index) for index, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for other in behind[order[-1]]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, (rank[other], other))
    return tuple(order)


def outward_order(graph: BlockGraph, draw: random.Random) -> tuple[int, ...]:
    """Any order in which each block waits for one before it or is waited for, as far as there is one.

    What is put down first stands close together, so that little memory is held between: as in Llosa and others, "Swing
    modulo scheduling" (PACT 1996).
    """
    near = [set(others) | set(block.after) for others, block in zip(following(graph), graph.blocks, strict=True)]
    left, edge, order = set(range(len(near))), list[int](), list[int]()
    while left:
        index = edge.pop(draw.randrange(len(edge))) if edge else draw.choice(sorted(left))
        if index in left:
            left.discard(index)
            order.append(index)
            edge += sorted(near[index] & left)
    return tuple(order)
