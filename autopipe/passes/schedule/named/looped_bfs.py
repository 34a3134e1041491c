"""Breadth-first looped pipeline: all micro-batches through a stage before the device's next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import Phase, StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, round_robin
from autopipe.passes.schedule.named.published import Published


@dataclass(frozen=True, slots=True)
class LoopedBreadthFirst(Published):
    """GPipe on several stages a device, stage by stage.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022), section 4.1. With v stages on each of p devices and at
    least p micro-batches the bubble is (p - 1)(F + B) / v; the activations of all micro-batches are kept.
    """

    name: ClassVar[str] = "looped_bfs"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of any number of stages, round robin."""
        return round_robin(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Forwards stage by stage, then backwards in the opposite order of stages."""
        return [
            [Task(stage, Phase.FORWARD, each) for stage in stages for each in range(micro_batches)]
            + [Task(stage, Phase.BACKWARD, each) for stage in reversed(stages) for each in range(micro_batches)]
            for stages in lanes
        ]
