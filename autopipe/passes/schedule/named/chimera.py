"""Chimera: two pipelines in opposite directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.grid import by_lane, on_grid
from autopipe.passes.schedule.named.lanes import Lanes, opposite
from autopipe.passes.schedule.named.published import Published


@dataclass(frozen=True, slots=True)
class Chimera(Published):
    """1F1B in both directions; each pipeline takes groups of half as many micro-batches as there are devices.

    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines" (2021),
    sections III-A and III-C, direct concatenation. With m micro-batches on p devices and F = B the bubble is p - 2
    slots of 2m + p - 2; a device keeps p/2 + 1 to p activations, and parameters twice.
    """

    name: ClassVar[str] = "chimera"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of two opposite pipelines."""
        return opposite(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Each lane's tasks by their slots."""
        down, up = [stages[0] for stages in lanes], [stages[1] for stages in reversed(lanes)]
        half = len(lanes) // 2
        slots = (*on_grid(down, range(0, micro_batches, 2), half), *on_grid(up, range(1, micro_batches, 2), half))
        return by_lane(lanes, slots)
