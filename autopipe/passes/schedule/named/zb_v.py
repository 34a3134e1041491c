"""ZB-V: no bubble where F = I = W, in 1F1B's memory, with two stages a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, one_wave
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.weights import fill_weights
from autopipe.passes.schedule.named.words import spell


@dataclass(frozen=True, slots=True)
class ZeroBubbleV(Published):
    """A V of two stages a device, so that the device that begins a micro-batch also turns its loss into gradients.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), the extended version's section on ZB-V. With at least 2p - 1
    micro-batches and F = I = W no device waits between its first task and its last; the activations of 2p stages are
    kept, as much as p of 1F1B's.
    """

    name: ClassVar[str] = "zb_v"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of a V."""
        return one_wave(self.name, graph)

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """The published order of forwards and input gradients, with weight gradients in its gaps."""
        count, every = len(lanes), range(micro_batches)
        orders = [
            spell(_words(place, count, micro_batches), stages, (every, every)) for place, stages in enumerate(lanes)
        ]
        return fill_weights(orders, 2 * count, 2 * count)


def _words(place: int, devices: int, micro_batches: int) -> Iterator[str]:
    """Tasks of a device without weight gradients: 0 is its stage on the way down, 1 the one on the way up."""
    yield from ("F0",) * (2 * (devices - place) - 1)
    yield from ("F1", "F0") * place
    yield from ("F1", "I1") * (devices - place)
    yield from ("F0", "I0", "F1", "I1") * max(micro_batches - devices, 0)
    yield from ("I0", "I1") * micro_batches
