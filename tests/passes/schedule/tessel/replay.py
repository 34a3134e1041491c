"""Replay of a schedule tick by tick. It shares no code with any search, nor with the check of
`ir`.
"""

from __future__ import annotations

from autopipe.ir.block_schedule import BlockSchedule


def faults(schedule: BlockSchedule, micro_batches: int) -> list[str]:
    """Return all faults of a schedule: missing blocks, dependencies, overlaps, and memory at each
    tick.
    """
    graph = schedule.graph
    found = []
    if len(schedule.starts) != micro_batches or any(
        len(each) != len(graph.blocks) for each in schedule.starts
    ):
        return ["each block of each unit must have one start"]
    running: dict[tuple[int, int], tuple[int, int]] = {}
    changes: dict[int, list[tuple[int, int]]] = {device: [] for device in range(graph.devices)}
    for micro_batch, starts in enumerate(schedule.starts):
        for index, start in enumerate(starts):
            block = graph.blocks[index]
            if start < 0:
                found.append(f"{block.name} of {micro_batch} starts before 0")
            for position, other in enumerate(block.after):
                delay = block.delays[position] if block.delays else 0
                if starts[other] + graph.blocks[other].time + delay > start:
                    found.append(
                        f"{block.name} of {micro_batch} does not wait for "
                        f"{graph.blocks[other].name}"
                    )
            for device in block.devices:
                changes[device].append((start, block.memory))
                for tick in range(start, start + block.time):
                    if (device, tick) in running:
                        found.append(
                            f"device {device} runs {(micro_batch, index)} "
                            f"and {running[device, tick]} "
                            f"at {tick}"
                        )
                    running[device, tick] = (micro_batch, index)
    for device, room in enumerate(graph.memory):
        for instant in {start for start, _ in changes[device]}:
            used = sum(change for start, change in changes[device] if start <= instant)
            if room is not None and used > room:
                found.append(f"device {device} holds {used} at {instant}, above {room}")
    return found
