"""True if a schedule of blocks can run: devices one at a time, dependencies, memory. Shares nothing with any search."""

from __future__ import annotations

from autopipe.ir.blocks import BlockSchedule
from autopipe.ir.errors import InfeasibleError


def check_blocks(schedule: BlockSchedule) -> None:
    """Raise InfeasibleError, in one line, for the first block that cannot start when the schedule says."""
    blocks = schedule.graph.blocks
    for unit, starts in enumerate(schedule.starts):
        if len(starts) != len(blocks):
            raise InfeasibleError(f"{len(starts)} starts for {len(blocks)} blocks", where=f"unit {unit}")
        for index, start in enumerate(starts):
            _check_start(schedule, unit, index, start)
    for device, tasks in enumerate(schedule.tasks):
        _check_device(schedule, device, tasks)


def _check_start(schedule: BlockSchedule, unit: int, index: int, start: int) -> None:
    """That a block starts at 0 or later, and after all that it waits for."""
    block = schedule.graph.blocks[index]
    if start < 0:
        raise InfeasibleError(f"{_named(schedule, unit, index)} starts at {start}, before 0")
    for position, other in enumerate(block.after):
        ready = schedule.starts[unit][other] + schedule.graph.blocks[other].time + block.delay(position)
        if start < ready:
            raise InfeasibleError(
                f"{_named(schedule, unit, index)} starts at {start}, but {_named(schedule, unit, other)}, which it "
                f"comes after, is there at {ready}"
            )


def _check_device(schedule: BlockSchedule, device: int, tasks: tuple[tuple[int, int, int], ...]) -> None:
    """That one block at a time runs on a device, within its memory."""
    blocks, room, where = schedule.graph.blocks, schedule.graph.memory[device], f"device {device}"
    used = free = 0
    before = ""
    for start, unit, index in tasks:
        name = _named(schedule, unit, index)
        if start < free:
            raise InfeasibleError(f"{name} starts at {start}, while {before} runs until {free}", where=where)
        used += blocks[index].memory
        if room is not None and used > room:
            raise InfeasibleError(f"memory in use is {used} when {name} starts, there is room for {room}", where=where)
        free, before = start + blocks[index].time, name


def _named(schedule: BlockSchedule, unit: int, index: int) -> str:
    return f"{schedule.graph.blocks[index].name!r} of unit {unit}"
