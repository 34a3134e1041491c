"""A shape before its chains are cut: which devices share what, and which go over a chain's stages one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.placement.tessel_shapes.cuts import CutLine
from autopipe.passes.placement.tessel_shapes.stages import stage_of


@dataclass(frozen=True, slots=True, eq=False)
class StageRow:
    """A line on a row of devices: a stage on each, in their order."""

    line: CutLine
    devices: tuple[int, ...]
    pipeline: int = 0


Outline = tuple[Stage | StageRow, ...]


def with_chains_cut(problem: Problem, outline: Outline, room: Sequence[float]) -> Placement:
    """The stages, those of rows even, with no more bytes of parameters than there is `room` for on each device.

    Raises InfeasibleError where a line has too few operators or no room.
    """
    stages: list[Stage] = []
    for part in outline:
        if isinstance(part, Stage):
            stages.append(part)
            continue
        kinds = [problem.cluster.devices[device] for device in part.devices]
        runs = part.line.even_on(kinds, [room[device] for device in part.devices])
        own = (stage_of(problem, run, (device,)) for run, device in zip(runs, part.devices, strict=True))
        stages += (replace(stage, pipeline=part.pipeline) for stage in own)
    return Placement(tuple(stages))
