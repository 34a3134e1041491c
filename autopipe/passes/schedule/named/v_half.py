"""V-Half: half of 1F1B's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, one_wave
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.v_pattern import Pattern, repeat


@dataclass(frozen=True, slots=True)
class VHalf(Published):
    """A V whose micro-batches come up twice as fast as they go down.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. With F = I = W the bubble is about
    half of 1F1B's, p/2 micro-batches' work; the activations of 2 ((p + 2) // 2) stages are kept, half of 1F1B's.
    """

    name: ClassVar[str] = "v_half"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of a V."""
        return one_wave(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """The pattern, repeated."""
        return repeat(lanes, micro_batches, _pattern, 2 * ((len(lanes) + 2) // 2))


def _pattern(place: int, devices: int) -> Pattern:
    """Two slots a device on the way down, one on the way up; a gap keeps repetitions of even depth apart."""
    gap = 0 if devices % 2 else 3
    turn = 3 * devices + gap
    return 2 * place, 3 * devices - 2 - place, turn - 1 + 2 * place, turn + 3 * devices - 2 - place
