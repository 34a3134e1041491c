"""A schedule of blocks as something to draw: no model, no seconds."""

from __future__ import annotations

import numpy as np

from autopipe.cli.drawing.picture import Bar, Curve, Picture
from autopipe.cli.drawing.steady import SteadyState
from autopipe.ir.block_schedule import Block, BlockSchedule
from autopipe.ir.schedule import Phase


def block_picture(schedule: BlockSchedule, title: str) -> Picture:
    """The picture of a schedule of blocks; a block on several devices stands on each one's row.

    A block's name tells its colour: F0 and B0 are two phases of one stage, as are TPf and TPb.
    """
    kinds = block_kinds(schedule.graph.blocks)
    bars = [
        Bar(device, start, start + block.time, f"{block.name}·{unit}", *kinds[index][:2], unit, kinds[index][2])
        for unit, starts in enumerate(schedule.starts)
        for index, (start, block) in enumerate(zip(starts, schedule.graph.blocks, strict=True))
        for device in block.devices
    ]
    return Picture(
        title=title,
        bars=tuple(sorted(bars, key=lambda bar: (bar.device, bar.start, bar.end))),
        memory=_memory(schedule),
        limits=schedule.graph.memory,
        end=schedule.makespan,
        physical=False,
        steady=_steady(schedule),
    )


def block_kinds(blocks: tuple[Block, ...]) -> tuple[tuple[int, Phase, str], ...]:
    """The stage and the phase that each block's name tells, with the phase's letter as the name has it.

    A name whose F (or f) becomes B, I or W names another phase of the same stage. A block with no such name is a stage
    of its own: a backward if it frees memory, a forward otherwise.
    """
    names = {block.name for block in blocks}
    stages: dict[str, int] = {}
    found = []
    for block in blocks:
        stem, phase, letter = _stem(block, names)
        found.append((stages.setdefault(stem, len(stages)), phase, letter))
    return tuple(found)


def _stem(block: Block, names: set[str]) -> tuple[str, Phase, str]:
    """The name of the forward of the block's stage, the block's own phase, and its letter."""
    for place, letter in enumerate(block.name):
        if letter in "FBIWfbiw":
            forward = "F" if letter.isupper() else "f"
            stem = block.name[:place] + forward + block.name[place + 1 :]
            if stem in names:
                return stem, Phase(letter.upper()), letter
    phase = Phase.BACKWARD if block.memory < 0 else Phase.FORWARD
    return block.name, phase, phase.value


def _memory(schedule: BlockSchedule) -> tuple[Curve, ...]:
    """A block's change counts from its start on; at one instant the device's blocks count in their order."""
    curves = []
    for tasks in schedule.tasks:
        curve: list[tuple[float, int]] = [(0, 0)]
        for start, _, index in tasks:
            used = curve[-1][1] + schedule.graph.blocks[index].memory
            if curve[-1][0] == start:
                curve[-1] = (start, used)
            elif curve[-1][1] != used:
                curve.append((start, used))
        curves.append(tuple(curve))
    return tuple(curves)


def _steady(schedule: BlockSchedule) -> SteadyState | None:
    """The longest run of repetitions that are as the repetend says: the r-th has block i of unit r + offset of i.

    The first and the last ones may differ: their blocks start as soon as they can.
    """
    repetend, period = schedule.repetend, schedule.period
    if repetend is None or period is None:
        return None
    offsets = np.array(repetend.offsets) - min(repetend.offsets)
    count = schedule.units - int(offsets.max())
    if count < 1:
        return None
    units = np.arange(count)[:, None] + offsets
    begins = np.array(schedule.starts)[units, np.arange(len(offsets))] - np.array(repetend.starts)
    regular = (begins == begins[:, :1]).all(axis=1)
    first, length = _longest_run(regular, begins[:, 0], period)
    start = int(begins[first, 0]) + min(repetend.starts)
    return SteadyState(start, start + length * period, length, period) if length else None


def _longest_run(regular: np.ndarray, begins: np.ndarray, period: int) -> tuple[int, int]:
    """(first, length) of the longest run of regular repetitions, each a period after the one before."""
    best, first = (0, 0), 0
    for index, each in enumerate(regular):
        if not each:
            first = index + 1
        elif index > first and begins[index] != begins[index - 1] + period:
            first = index
        if index + 1 - first > best[1]:
            best = first, index + 1 - first
    return best
