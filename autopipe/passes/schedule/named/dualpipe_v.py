"""DualPipeV: DualPipe folded in the middle, with parameters once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.dualpipe import dual_words
from autopipe.passes.schedule.named.lanes import Lanes, one_wave
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.words import spell


@dataclass(frozen=True, slots=True)
class DualPipeV(Published):
    """DualPipe's half of the devices, with one pipeline that goes down and comes up as the two directions.

    DeepSeek-AI, DualPipe (2025), after Sea AI Lab's idea to cut it in half. With P = 2p stages on p devices the bubble
    is (p - 1)(F&B + B - 3W), and 2p + 1 activations of stages are kept: DualPipe's formulas for P.
    """

    name: ClassVar[str] = "dualpipe_v"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of a V, and enough micro-batches to keep it busy."""
        lanes = one_wave(self.name, graph)
        if micro_batches < 2 * len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} on {len(lanes)} devices runs {2 * len(lanes)} micro-batches or more, "
                f"but there are {micro_batches}",
                hint="take zb_v, or more micro-batches",
            )
        return lanes

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """DualPipe's order, the two directions being a device's two stages."""
        every = range(micro_batches)
        return [
            spell(dual_words(place, len(lanes), micro_batches), stages, (every, every))
            for place, stages in enumerate(lanes)
        ]
