"""Interleaved 1F1B: several stages a device, passed round robin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Phase, StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, round_robin
from autopipe.passes.schedule.named.published import Published


@dataclass(frozen=True, slots=True)
class InterleavedOneForwardOneBackward(Published):
    """Each device runs a group of as many micro-batches as there are devices through each of its stages in turn.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section
    2.2.2. With v stages on each of p devices the bubble is (p - 1)(F + B) / v, and vp + p - 1 activations are kept.
    """

    name: ClassVar[str] = "interleaved_1f1b"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of several stages, round robin, and whole groups of micro-batches."""
        lanes = round_robin(self.name, graph)
        if len(lanes[0]) < 2:
            raise InfeasibleError(
                f"schedule {self.name} runs several stages a device, but here is one", hint="take 1f1b"
            )
        if micro_batches % len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} runs groups of {len(lanes)} micro-batches, one for each device, but there are "
                f"{micro_batches}",
                hint=f"make their number a multiple of {len(lanes)}",
            )
        return lanes

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Forwards until the first backward can arrive, then one forward and one backward in turn."""
        devices = len(lanes)
        found = []
        for place, stages in enumerate(lanes):
            forwards = _in_groups(Phase.FORWARD, stages, devices, micro_batches)
            backwards = _in_groups(Phase.BACKWARD, stages[::-1], devices, micro_batches)
            ahead = min((len(stages) - 1) * devices + 2 * (devices - 1 - place), len(forwards))
            order = forwards[:ahead]
            for index, backward in enumerate(backwards):
                order += [*forwards[ahead + index : ahead + index + 1], backward]
            found.append(order)
        return found


def _in_groups(phase: Phase, stages: Sequence[int], group: int, micro_batches: int) -> list[Task]:
    """All of a device's tasks of a phase: a group of micro-batches through stage after stage, then the next group."""
    return [
        Task(stage, phase, micro_batch)
        for first in range(0, micro_batches, group)
        for stage in stages
        for micro_batch in range(first, first + group)
    ]
