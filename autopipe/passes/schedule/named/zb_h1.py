"""ZB-H1: 1F1B with backwards in halves, in 1F1B's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import Phase, StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, one_each
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.weights import fill_weights


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(Published):
    """1F1B whose weight gradients fill slots in which a device would wait.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.1. On p devices, with at least p micro-batches,
    the bubble is (p - 1)(F + I - W), and p activations are kept.
    """

    name: ClassVar[str] = "zb_h1"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of one stage."""
        return one_each(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """1F1B's order of forwards and input gradients, with weight gradients in its gaps."""
        count = len(lanes)
        orders = [halves_in_turn(stage, count - 1 - stage, micro_batches) for stage in range(count)]
        return fill_weights(orders, count, count)


def halves_in_turn(stage: int, ahead: int, micro_batches: int) -> list[Task]:
    """So many forwards, then a forward and an input gradient in turn."""
    forwards = [Task(stage, Phase.FORWARD, each) for each in range(micro_batches)]
    order = forwards[:ahead]
    for each in range(micro_batches):
        order += [*forwards[ahead + each : ahead + each + 1], Task(stage, Phase.INPUT_GRADIENT, each)]
    return order
