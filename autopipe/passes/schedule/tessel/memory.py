"""Memory changes of a unit that frees as much as it allocates, whatever the blocks given do."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.block_schedule import BlockGraph


def changes(graph: BlockGraph, device: int) -> dict[int, int]:
    """Change of the memory in use on a device by each block there, with the sum 0.

    Memory that a unit never frees is taken off its last allocations; memory it frees without having it, off its first
    frees.
    """
    found = {index: block.memory for index, block in enumerate(graph.blocks) if device in block.devices}
    left = sum(found.values())
    for index in reversed(graph.order) if left > 0 else graph.order:
        if index in found and found[index] * left > 0:
            taken = min(abs(found[index]), abs(left)) * (1 if left > 0 else -1)
            found[index] -= taken
            left -= taken
    return found


def kept(graph: BlockGraph, device: int) -> int:
    """Memory that a unit adds on a device and never frees; negative where it frees more."""
    return sum(block.memory for block in graph.blocks if device in block.devices)


def frees_all(graph: BlockGraph) -> bool:
    """True if a unit frees on each limited device what it allocates there, so that `changes` are its own."""
    return not any(kept(graph, device) for device, room in enumerate(graph.memory) if room is not None)


def reserved(graph: BlockGraph, units: int) -> BlockGraph:
    """The same blocks, with the memory that `units` units never free taken from the room from the start."""
    rooms = enumerate(graph.memory)
    memory = (None if room is None else room - units * max(0, kept(graph, device)) for device, room in rooms)
    return replace(graph, memory=tuple(memory))
