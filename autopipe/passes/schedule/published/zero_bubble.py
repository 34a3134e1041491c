"""Zero-bubble schedules (ZB-H1, ZB-H2, ZB-V), V schedules of controllable memory (V-Half, V-Min),
DualPipe, DualPipeV.

A backward is split into I, the gradients of inputs, which other devices wait for, and W, those of
weights, which fill what would be bubbles: B and W in the papers, where F = B = W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Phase, StageGraph, Task
from autopipe.ir.words import plural
from autopipe.passes.schedule.published.base import (
    CHAIN,
    ONE_WAVE,
    OPPOSITE,
    Form,
    LaneStages,
    Published,
    by_lane,
    fill_weights,
    in_turn,
    spell,
)


class ZeroBubbleH1(Published):
    """1F1B whose weight gradients fill slots in which a device would wait.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.1. On p devices, with at least p
    micro-batches, the bubble is (p - 1)(F + I - W), and p activations are kept.
    """

    name: ClassVar[str] = "zb_h1"
    form: ClassVar[Form] = CHAIN
    factor: ClassVar[int] = 1
    """Stage s of p warms up with factor (p - 1 - s) forwards and has room for factor (p - 1) + 1
    activations.
    """

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """1F1B's order of F and I, after another warm-up, with W in its gaps."""
        p = len(lanes)
        every = range(micro_batches)
        orders = [
            in_turn(
                [Task(s, Phase.FORWARD, m) for m in every],
                [Task(s, Phase.INPUT_GRADIENT, m) for m in every],
                self.factor * (p - 1 - s) + 1,
            )
            for s in range(p)
        ]
        return fill_weights(orders, p, self.factor * (p - 1) + 1)


class ZeroBubbleH2(ZeroBubbleH1):
    """Each device runs as many forwards ahead as fill the time until its first backward.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.2. With at least 2p - 1
    micro-batches no device waits longer than (p - 1)(F + I - 2W) between its first task and its
    last; 2p - 1 activations are kept. Devices start and end one after another, p - 1 forwards
    apart.
    """

    name: ClassVar[str] = "zb_h2"
    factor: ClassVar[int] = 2


class ZeroBubbleV(Published):
    """A V of two stages a device, so that the device that begins a micro-batch also turns its loss
    into gradients.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), the extended version's section on ZB-V.
    With at least 2p - 1 micro-batches and F = I = W no device waits between its first task and its
    last; the activations of 2p stages are kept, as much as p of 1F1B's.
    """

    name: ClassVar[str] = "zb_v"
    form: ClassVar[Form] = ONE_WAVE

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        p = len(lanes)
        every = range(micro_batches)
        orders = [
            spell(_words(place, p, micro_batches), stages, (every, every))
            for place, stages in enumerate(lanes)
        ]
        return fill_weights(orders, 2 * p, 2 * p)


def _words(place: int, p: int, micro_batches: int) -> Iterator[str]:
    """Tasks of a device without W: 0 is its stage on the way down, 1 the one on the way up."""
    yield from ("F0",) * (2 * (p - place) - 1)
    yield from ("F1", "F0") * place
    yield from ("F1", "I1") * (p - place)
    yield from ("F0", "I0", "F1", "I1") * max(micro_batches - p, 0)
    yield from ("I0", "I1") * micro_batches


class VHalf(Published):
    """A V whose micro-batches come up twice as fast as they go down.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. With F = I = W
    the bubble is about half of 1F1B's, p/2 micro-batches' work; the activations of 2 ((p + 2) // 2)
    stages are kept, half of 1F1B's.
    """

    name: ClassVar[str] = "v_half"
    form: ClassVar[Form] = ONE_WAVE
    part: ClassVar[int] = 2
    """1 / part of 1F1B's activations are kept; a micro-batch takes 4 - part slots a device on the
    way down, one up.
    """

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """One micro-batch's pattern, repeated every six slots (F, I and W of two stages) and then
        moved together. Section 3: how long a pattern holds activations says how many are kept. A
        gap keeps repetitions apart where `part` divides the number of devices. W stands where a
        device would wait, and where more would be kept.
        """
        p = len(lanes)
        down_slots = 4 - self.part
        slots = []
        way = (down_slots + 1) * p
        turn = way + (0 if p % self.part else down_slots + 1)
        for place, (down, up) in enumerate(lanes):
            there = down_slots * place
            back = way - down_slots - place
            for slot, stage, phase in (
                (there, down, Phase.FORWARD),
                (back, up, Phase.FORWARD),
                (turn + there + 1 - down_slots, up, Phase.INPUT_GRADIENT),
                (turn + back, down, Phase.INPUT_GRADIENT),
            ):
                slots += [(slot + 6 * m, Task(stage, phase, m)) for m in range(micro_batches)]
        return fill_weights(
            by_lane(lanes, slots), 2 * p, 2 * ((p + 2 * self.part - 2) // self.part)
        )


class VMin(VHalf):
    """A V whose micro-batches pass as fast as they can: the shorter they are under way, the less is
    kept.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. With F = I = W
    the bubble is about two thirds of 1F1B's, 2p/3 micro-batches' work; the activations of 2 ((p +
    4) // 3) stages are kept, a third.
    """

    name: ClassVar[str] = "v_min"
    part: ClassVar[int] = 3


class DualPipe(Published):
    """Each device runs forwards of one direction beside backwards of the other.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1. On p devices the bubble is
    (p/2 - 1)(F&B + B - 3W), with F&B the time of a forward and a backward that overlap; p + 1
    activations are kept, and parameters twice. Here the two run one after the other, the forward
    first.
    """

    name: ClassVar[str] = "dualpipe"
    form: ClassVar[Form] = OPPOSITE

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        lanes = self.form.lanes(self.name, graph)
        if micro_batches % 2 or micro_batches < 2 * len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} on {len(lanes)} {plural(len(lanes), 'device')} "
                "runs an even number of micro-batches, "
                f"{2 * len(lanes)} or more, but there are {micro_batches}",
                hint="take chimera, or more micro-batches",
            )
        return lanes

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """The same on both ends; on each the direction that begins there comes first."""
        directions = range(0, micro_batches, 2), range(1, micro_batches, 2)
        half = len(lanes) // 2
        found = []
        for place, stages in enumerate(lanes):
            near = min(place, len(lanes) - 1 - place)
            way = 1 if place < half else -1
            found.append(
                spell(_dual_words(near, half, micro_batches // 2), stages[::way], directions[::way])
            )
        return found


def _dual_words(place: int, depth: int, micro_batches: int) -> Iterator[str]:
    """Tasks of the device `place` steps from one end, of `depth` devices up to the middle, in the
    eight phases of DeepSeek-AI's figure 5. 0 is the direction that begins at this end;
    `micro_batches` are those of one direction.
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


class DualPipeV(Published):
    """DualPipe's half of the devices, with one pipeline that goes down and comes up as the two
    directions.

    DeepSeek-AI, DualPipe (2025), after Sea AI Lab's idea to cut it in half. With P = 2p stages on p
    devices the bubble is (p - 1)(F&B + B - 3W), and 2p + 1 activations of stages are kept:
    DualPipe's formulas for P.
    """

    name: ClassVar[str] = "dualpipe_v"
    form: ClassVar[Form] = ONE_WAVE

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        lanes = self.form.lanes(self.name, graph)
        if micro_batches < 2 * len(lanes):
            raise InfeasibleError(
                f"schedule {self.name} on {len(lanes)} {plural(len(lanes), 'device')} "
                f"runs {2 * len(lanes)} micro-batches or more, "
                f"but there are {micro_batches}",
                hint="take zb_v, or more micro-batches",
            )
        return lanes

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        every = range(micro_batches)
        return [
            spell(_dual_words(place, len(lanes), micro_batches), stages, (every, every))
            for place, stages in enumerate(lanes)
        ]
