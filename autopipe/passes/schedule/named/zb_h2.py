"""ZB-H2: no bubble where F = I = W, for about twice 1F1B's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, one_each
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.weights import fill_weights
from autopipe.passes.schedule.named.zb_h1 import halves_in_turn


@dataclass(frozen=True, slots=True)
class ZeroBubbleH2(Published):
    """Each device runs as many forwards ahead as fill the time until its first backward.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.2. With at least 2p - 1 micro-batches no device
    waits longer than (p - 1)(F + I - 2W) between its first task and its last; 2p - 1 activations are kept. Devices
    start and end one after another, p - 1 forwards apart.
    """

    name: ClassVar[str] = "zb_h2"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of one stage."""
        return one_each(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Twice as many forwards ahead as in 1F1B, with weight gradients in the gaps."""
        count = len(lanes)
        orders = [halves_in_turn(stage, 2 * (count - 1 - stage), micro_batches) for stage in range(count)]
        return fill_weights(orders, count, 2 * count - 1)
