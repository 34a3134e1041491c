"""Hanayo: one pipeline in waves, down the devices and up again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.grid import by_lane, on_grid
from autopipe.passes.schedule.named.lanes import Lanes, waves
from autopipe.passes.schedule.named.published import Published


@dataclass(frozen=True, slots=True)
class Hanayo(Published):
    """Chimera without a second copy of the parameters: its two directions are two halves of one pipeline.

    Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency" (2023).
    The placement says how many waves there are: w waves are 2w stages on each of p devices. Groups of p micro-batches
    follow one another without a gap on the grid, so that with F = B the bubble is (p - 1)(F + B) / 2w whatever their
    number; 2wp activations are kept.
    """

    name: ClassVar[str] = "hanayo"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of waves."""
        return waves(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Each lane's tasks by their slots."""
        return by_lane(lanes, on_grid(range(len(lanes) * len(lanes[0])), range(micro_batches), len(lanes)))
