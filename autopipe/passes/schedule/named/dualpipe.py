"""DualPipe: two pipelines in opposite directions, some backwards in halves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.named.lanes import Lanes, opposite
from autopipe.passes.schedule.named.published import Published
from autopipe.passes.schedule.named.words import spell


@dataclass(frozen=True, slots=True)
class DualPipe(Published):
    """Each device runs forwards of one direction beside backwards of the other.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1. On p devices the bubble is
    (p/2 - 1)(F&B + B - 3W), with F&B the time of a forward and a backward that overlap; p + 1 activations are kept, and
    parameters twice. Here the two run one after the other, the forward first.
    """

    name: ClassVar[str] = "dualpipe"

    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """Lanes of two opposite pipelines, and as many micro-batches for each as keep the middle busy."""
        lanes = opposite(self.name, graph)
        if micro_batches % 2 or micro_batches < 2 * len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} on {len(lanes)} devices runs an even number of micro-batches, "
                f"{2 * len(lanes)} or more, but there are {micro_batches}",
                hint="take chimera, or more micro-batches",
            )
        return lanes

    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """The same on both ends; on each the direction that begins there comes first."""
        directions = range(0, micro_batches, 2), range(1, micro_batches, 2)
        half = len(lanes) // 2
        near = [
            spell(dual_words(place, half, micro_batches // 2), stages, directions)
            for place, stages in enumerate(lanes[:half])
        ]
        far = [
            spell(dual_words(place, half, micro_batches // 2), stages[::-1], directions[::-1])
            for place, stages in enumerate(reversed(lanes[half:]))
        ]
        return near + far[::-1]


def dual_words(place: int, depth: int, micro_batches: int) -> Iterator[str]:
    """Tasks of the device `place` steps from one end, of `depth` devices up to the middle, in eight phases. 0 is the
    direction that begins at this end. `micro_batches` are those of one direction.
    """
    inner = depth - 1 - place
    yield from ("F0",) * (2 * inner)
    yield from ("F0", "F1") * (place + 1)
    yield from ("I1", "W", "F1") * inner
    yield from ("F0", "B1", "F1", "B0") * (micro_batches - 2 * depth + place + 1)
    yield from ("B1", "F1", "B0") * inner
    yield from (("B", "I")[index > place] + "10"[index % 2] for index in range(2 * (place + 1)))
    yield from ("W", "I0") * inner
    yield from ("W",) * (place + 1)
