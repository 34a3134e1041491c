"""Lower bounds on any schedule, from the blocks alone."""

from __future__ import annotations

import math

from autopipe.ir.block_schedule import BlockGraph


def period_bound(graph: BlockGraph) -> int:
    """No steady state has a shorter period: the largest load of a device, and Little's law where memory is limited."""
    return max(*graph.loads, *(_little(graph, device) for device in range(graph.devices)), 1)


def heads(graph: BlockGraph) -> tuple[int, ...]:
    """Earliest start of each block in a unit that is alone and has all devices to itself."""
    found = [0] * len(graph.blocks)
    for index in graph.order:
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            found[index] = max(found[index], found[other] + graph.blocks[other].time + block.delay(position))
    return tuple(found)


def tails(graph: BlockGraph) -> tuple[int, ...]:
    """Least time from the end of each block to the end of its unit."""
    found = [0] * len(graph.blocks)
    for index in reversed(graph.order):
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            found[other] = max(found[other], found[index] + block.time + block.delay(position))
    return tuple(found)


def unit_bound(graph: BlockGraph) -> int:
    """No unit takes less from its first start to its last end."""
    return max(head + block.time for head, block in zip(heads(graph), graph.blocks, strict=True))


def makespan_bound(graph: BlockGraph, units: int) -> int:
    """Lower bound on the makespan of `units` units: one unit's longest way, and each device's load between its ends."""
    first, last = heads(graph), tails(graph)
    found = unit_bound(graph)
    on_device: list[list[int]] = [[] for _ in range(graph.devices)]
    for index, block in enumerate(graph.blocks):
        for device in block.devices:
            on_device[device].append(index)
    for members, load in zip(on_device, graph.loads, strict=True):
        if members:
            ends = min(first[index] for index in members) + min(last[index] for index in members)
            found = max(found, units * load + ends)
    return found


def distances(graph: BlockGraph, source: int) -> dict[int, int]:
    """Least time from the start of a block to the start of each that waits for it, itself included."""
    found = {source: 0}
    for index in graph.order:
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            if other in found:
                way = found[other] + graph.blocks[other].time + block.delay(position)
                found[index] = max(found.get(index, 0), way)
    return found


def _little(graph: BlockGraph, device: int) -> int:
    """Little's law: memory in use on average is what a unit holds times how long it holds it, over the period."""
    limit = graph.memory[device]
    step = math.gcd(*(block.memory for block in graph.blocks if device in block.devices))
    if limit is None or step == 0 or limit < step:
        return 0
    return math.ceil(_held(graph, device) / (limit // step * step))


def _held(graph: BlockGraph, device: int) -> int:
    """Least sum over the memory of one unit on a device of the time that it is held; 0 where nothing can be said.

    The least of -sum(memory x start) under the dependencies. Each way of sending what is allocated to where it is freed
    is a solution of the dual problem and so gives a lower bound: here the longest ways first.
    """
    left = {index: block.memory for index, block in enumerate(graph.blocks) if device in block.devices}
    held = 0
    for index in [index for index, memory in left.items() if memory > 0]:
        away = distances(graph, index)
        for other in sorted((each for each in away if left.get(each, 0) < 0), key=lambda each: -away[each]):
            amount = min(left[index], -left[other])
            left[index] -= amount
            left[other] += amount
            held += amount * away[other]
    return held if not any(left.values()) else 0
