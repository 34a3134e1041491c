"""V-Min: a third of 1F1B's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, one_wave
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.v_pattern import Pattern, repeat


@dataclass(frozen=True, slots=True)
class VMin(Published):
    """A V whose micro-batches pass as fast as they can: the shorter they are under way, the less is kept.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. With F = I = W the bubble is about
    two thirds of 1F1B's, 2p/3 micro-batches' work; the activations of 2 ((p + 4) // 3) stages are kept, a third.
    """

    name: ClassVar[str] = "v_min"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of a V."""
        return one_wave(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """The pattern, repeated."""
        return repeat(lanes, micro_batches, _pattern, 2 * ((len(lanes) + 4) // 3))


def _pattern(place: int, devices: int) -> Pattern:
    """One slot a device, both ways; a gap keeps repetitions apart where a third of the devices is a whole number."""
    gap = 0 if devices % 3 else 2
    turn = 2 * devices + gap
    return place, 2 * devices - 1 - place, turn + place, turn + 2 * devices - 1 - place
