"""Memory changes of a unit that frees as much as it allocates, whatever the blocks given do."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.blocks import BlockGraph
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.room import require_room


def changes(graph: BlockGraph, device: int) -> dict[int, int]:
    """What each block on a device adds to the memory in use there, with the sum 0.

    What a unit never frees is taken off its last allocations; what it frees without having it, off its first frees.
    """
    found = {index: block.memory for index, block in enumerate(graph.blocks) if device in block.devices}
    left = sum(found.values())
    for index in reversed(graph.order) if left > 0 else graph.order:
        if index in found and found[index] * left > 0:
            taken = min(abs(found[index]), abs(left)) * (1 if left > 0 else -1)
            found[index] -= taken
            left -= taken
    return found


def frees_all(graph: BlockGraph) -> bool:
    """Whether a unit frees on each limited device what it allocates there, so that `changes` are its own."""
    limited = (device for device, room in enumerate(graph.memory) if room is not None)
    return not any(sum(block.memory for block in graph.blocks if device in block.devices) for device in limited)


def reserved(graph: BlockGraph, units: int) -> BlockGraph:
    """The same blocks, with what so many units never free taken from the room from the start.

    Raises InfeasibleError, naming the device, where that leaves less than nothing.
    """
    memory: list[int | None] = []
    for device, room in enumerate(graph.memory):
        kept = units * max(0, sum(block.memory for block in graph.blocks if device in block.devices))
        if room is not None and kept > room:
            require_room(graph, units)
            message = f"{units} units leave {kept} of memory in use, there is room for {room}"
            raise InfeasibleError(message, hint="give it more, or schedule fewer units", where=f"device {device}")
        memory.append(None if room is None else room - kept)
    return replace(graph, memory=tuple(memory))
