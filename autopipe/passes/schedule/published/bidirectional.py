"""Two pipelines in opposite directions: Chimera, DualPipe, and DualPipeV, which is DualPipe folded in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import StageGraph, Task
from autopipe.passes.schedule.published.base import LaneStages, Published, by_lane, on_grid, one_wave, opposite, spell


@dataclass(frozen=True, slots=True)
class Chimera(Published):
    """1F1B in both directions; each pipeline takes groups of half as many micro-batches as there are devices.

    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines" (2021),
    sections III-A and III-C, direct concatenation. With m micro-batches on p devices and F = B the bubble is p - 2
    slots of 2m + p - 2; a device keeps p/2 + 1 to p activations, and parameters twice.
    """

    name: ClassVar[str] = "chimera"

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        return opposite(self.name, graph)

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        down, up = [stages[0] for stages in lanes], [stages[1] for stages in reversed(lanes)]
        half = len(lanes) // 2
        slots = (*on_grid(down, range(0, micro_batches, 2), half), *on_grid(up, range(1, micro_batches, 2), half))
        return by_lane(lanes, slots)


@dataclass(frozen=True, slots=True)
class DualPipe(Published):
    """Each device runs forwards of one direction beside backwards of the other.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1. On p devices the bubble is
    (p/2 - 1)(F&B + B - 3W), with F&B the time of a forward and a backward that overlap; p + 1 activations are kept, and
    parameters twice. Here the two run one after the other, the forward first.
    """

    name: ClassVar[str] = "dualpipe"

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        """Lanes of two opposite pipelines, and as many micro-batches for each as keep the middle busy."""
        lanes = opposite(self.name, graph)
        if micro_batches % 2 or micro_batches < 2 * len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} on {len(lanes)} devices runs an even number of micro-batches, "
                f"{2 * len(lanes)} or more, but there are {micro_batches}",
                hint="take chimera, or more micro-batches",
            )
        return lanes

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """The same on both ends; on each the direction that begins there comes first."""
        directions = range(0, micro_batches, 2), range(1, micro_batches, 2)
        half = len(lanes) // 2
        words = [tuple(_words(place, half, micro_batches // 2)) for place in range(half)]
        near = [spell(*each, directions) for each in zip(words, lanes[:half], strict=True)]
        far = [
            spell(each, stages[::-1], directions[::-1]) for each, stages in zip(words[::-1], lanes[half:], strict=True)
        ]
        return near + far


def _words(place: int, depth: int, micro_batches: int) -> Iterator[str]:
    """Tasks of the device `place` steps from one end, of `depth` devices up to the middle, in the eight phases of
    DeepSeek-AI's figure 5. 0 is the direction that begins at this end; `micro_batches` are those of one direction.
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


@dataclass(frozen=True, slots=True)
class DualPipeV(Published):
    """DualPipe's half of the devices, with one pipeline that goes down and comes up as the two directions.

    DeepSeek-AI, DualPipe (2025), after Sea AI Lab's idea to cut it in half. With P = 2p stages on p devices the bubble
    is (p - 1)(F&B + B - 3W), and 2p + 1 activations of stages are kept: DualPipe's formulas for P.
    """

    name: ClassVar[str] = "dualpipe_v"

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        """Lanes of a V, and enough micro-batches to keep it busy."""
        lanes = one_wave(self.name, graph)
        if micro_batches < 2 * len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} on {len(lanes)} devices runs {2 * len(lanes)} micro-batches or more, "
                f"but there are {micro_batches}",
                hint="take zb_v, or more micro-batches",
            )
        return lanes

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """DualPipe's order, the two directions being a device's two stages."""
        every = range(micro_batches)
        return [
            spell(_words(place, len(lanes), micro_batches), stages, (every, every))
            for place, stages in enumerate(lanes)
        ]
