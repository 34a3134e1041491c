"""Exact optima of small instances, by trying all possibilities."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from autopipe.ir.block_schedule import BlockGraph


def minimum_makespan(graph: BlockGraph, micro_batches: int) -> int | None:
    """Return the minimum makespan over all orders in which blocks of all micro-batches start, each
    as early as it can after the earlier ones; None if no order fits in memory.

    Some optimal schedule is among them: take the order of its starts, with ties in any order.
    """
    blocks = graph.blocks

    @cache
    def rest(
        started: frozenset[tuple[int, int]],
        free: tuple[int, ...],
        ends: tuple[tuple[tuple[int, int], int], ...],
    ) -> float:
        if len(started) == micro_batches * len(blocks):
            return 0.0
        known = dict(ends)
        best = float("inf")
        for micro_batch, index in product(range(micro_batches), range(len(blocks))):
            block = blocks[index]
            if (micro_batch, index) in started or any(
                (micro_batch, other) not in started for other in block.after
            ):
                continue
            if micro_batch and (micro_batch - 1, index) not in started:
                continue  # Micro-batches are equal.
            if not _fits_in_memory(graph, started, index):
                continue
            start = max(free[device] for device in block.devices)
            for position, other in enumerate(block.after):
                start = max(
                    start,
                    known[micro_batch, other] + (block.delays[position] if block.delays else 0),
                )
            after = tuple(
                start + block.time if device in block.devices else at
                for device, at in enumerate(free)
            )
            grown = started | {(micro_batch, index)}
            needed = {
                (each, other): end
                for (each, other), end in {
                    **known,
                    (micro_batch, index): start + block.time,
                }.items()
                if any(
                    other in blocks[later].after and (each, later) not in grown
                    for later in range(len(blocks))
                )
            }
            end = max(start + block.time, rest(grown, after, tuple(sorted(needed.items()))))
            best = min(best, end)
        return best

    found = rest(frozenset(), (0,) * graph.devices, ())
    return None if found == float("inf") else int(found)


def _fits_in_memory(graph: BlockGraph, started: frozenset[tuple[int, int]], index: int) -> bool:
    for device in graph.blocks[index].devices:
        used = sum(
            graph.blocks[other].memory
            for _, other in started
            if device in graph.blocks[other].devices
        )
        room = graph.memory[device]
        if room is not None and used + graph.blocks[index].memory > room:
            return False
    return True


def minimum_period(graph: BlockGraph, longest: int) -> int:
    """Return the smallest integer period up to `longest` for which some starts can be repeated
    endlessly.
    """
    return next(period for period in range(1, longest + 1) if any(_repeatable(graph, period)))


def _repeatable(graph: BlockGraph, period: int) -> Iterator[bool]:
    blocks = graph.blocks
    topological = graph.order
    for phases in product(*([range(1)] + [range(period)] * (len(blocks) - 1))):
        if not _exclusive(graph, phases, period):
            continue
        for slack in product(range(3), repeat=len(blocks)):
            starts = [0] * len(blocks)
            for index in topological:
                block = blocks[index]
                ready = 0
                for position, other in enumerate(block.after):
                    delay = block.delays[position] if block.delays else 0
                    ready = max(ready, starts[other] + blocks[other].time + delay)
                turns = max(0, -(-(ready - phases[index]) // period))
                starts[index] = phases[index] + period * (turns + slack[index])
            if _fits(graph, starts, period):
                yield True
            if all(room is None for room in graph.memory):
                break


def _exclusive(graph: BlockGraph, phases: tuple[int, ...], period: int) -> bool:
    taken: set[tuple[int, int]] = set()
    for block, phase in zip(graph.blocks, phases, strict=True):
        for device, tick in product(block.devices, range(phase, phase + block.time)):
            if (device, tick % period) in taken:
                return False
            taken.add((device, tick % period))
    return True


def _fits(graph: BlockGraph, starts: list[int], period: int) -> bool:
    """True if the memory at each start fits, if infinitely many micro-batches precede and
    follow.
    """
    reach = max(starts) // period + 2
    for device, room in enumerate(graph.memory):
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        for instant in range(period) if room is not None else ():
            used = 0
            for micro_batch in range(-reach, reach + 1):
                used += sum(
                    graph.blocks[index].memory
                    for index in members
                    if starts[index] + micro_batch * period <= instant
                )
            if room is not None and used > room:
                return False
    return True
