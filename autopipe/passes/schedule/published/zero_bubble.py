"""Zero-bubble schedules (ZB-H1, ZB-H2, ZB-V), V schedules with controllable memory (V-Half, V-Min),
DualPipe and DualPipeV.

A backward is split into I, the input gradients, which other stages wait for, and W, the weight
gradients, which fill slots that would otherwise be idle. The papers call I and W "B" and "W".

In formulas, p is the number of devices of a pipeline. F, B, I and W are the times that one
micro-batch takes on one device in the tasks of these phases, where B = I + W.
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
    PlacementPattern,
    Published,
    RankStages,
    alternate_phases,
    insert_weight_gradients,
    order_from_notation,
    orders_by_slot,
)


class ZeroBubbleH1(Published):
    """1F1B in which backwards are split into input gradients and weight gradients, and weight
    gradients fill idle slots.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.1. Let F, I and W be the times
    of a forward, an input gradient and a weight gradient of one micro-batch. On p devices, with at
    least p micro-batches, the bubble is (p - 1)(F + I - W). A device saves the activations of at
    most p micro-batches.
    """

    name: ClassVar[str] = "zb_h1"
    pattern: ClassVar[PlacementPattern] = CHAIN
    warm_up_factor: ClassVar[int] = 1
    """Stage s of p runs `warm_up_factor` * (p - 1 - s) + 1 forwards before its first input
    gradient. It saves the activations of up to `warm_up_factor` * (p - 1) + 1 micro-batches.
    """

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return, for each rank, the order of 1F1B with I (input gradients) instead of B. Weight
        gradients (W) fill the slots in which the rank would be idle. The number of warm-up forwards
        depends on `warm_up_factor`.
        """
        p = len(rank_stages)
        orders = [
            alternate_phases(
                [Task(s, Phase.FORWARD, m) for m in range(micro_batches)],
                [Task(s, Phase.INPUT_GRADIENT, m) for m in range(micro_batches)],
                self.warm_up_factor * (p - 1 - s) + 1,
            )
            for s in range(p)
        ]
        return insert_weight_gradients(orders, p, self.warm_up_factor * (p - 1) + 1)


class ZeroBubbleH2(ZeroBubbleH1):
    """ZB-H1 with more warm-up forwards: a device runs forwards until its first input gradient is
    ready.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.2. Let F, I and W be the times
    of a forward, an input gradient and a weight gradient of one micro-batch. On p devices, with at
    least 2p - 1 micro-batches, no device is idle for longer than (p - 1)(F + I - 2W) between its
    first and its last task. A device saves the activations of at most 2p - 1 micro-batches. Devices
    start one after another, p - 1 forwards from the first to the last, and end in the same order.
    """

    name: ClassVar[str] = "zb_h2"
    warm_up_factor: ClassVar[int] = 2


class ZeroBubbleV(Published):
    """Zero-bubble schedule with two stages per device in a V: the device with the first stage also
    has the last stage, and starts the backwards. Backwards are split into input gradients (I) and
    weight gradients (W).

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), the section on ZB-V of the extended
    version. On p devices, with at least 2p - 1 micro-batches, and if a forward, an I and a W take
    equally long, no device is idle between its first and its last task. A device saves the
    activations of 2p forwards of stages, as many bytes as those of p micro-batches under 1F1B.
    """

    name: ClassVar[str] = "zb_v"
    pattern: ClassVar[PlacementPattern] = ONE_WAVE

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each rank: the forwards and input gradients of
        `_zb_v_notation`. Weight gradients fill the slots in which the rank would be idle.
        """
        p = len(rank_stages)
        every = range(micro_batches)
        orders = [
            order_from_notation(_zb_v_notation(rank, p, micro_batches), stages, (every, every))
            for rank, stages in enumerate(rank_stages)
        ]
        return insert_weight_gradients(orders, 2 * p, 2 * p)


def _zb_v_notation(rank: int, p: int, micro_batches: int) -> Iterator[str]:
    """Yield the forwards and input gradients of a pipeline rank in order, as words for
    `order_from_notation`. Index 0 is the rank's stage on the way from rank 0 to p - 1, index 1 its
    stage on the way back.
    """
    yield from ("F0",) * (2 * (p - rank) - 1)
    yield from ("F1", "F0") * rank
    yield from ("F1", "I1") * (p - rank)
    yield from ("F0", "I0", "F1", "I1") * max(micro_batches - p, 0)
    yield from ("I0", "I1") * micro_batches


class VHalf(Published):
    """Two stages per device in a V (the pipeline visits the devices in ascending and then in
    descending order), with half of the activation memory of 1F1B. Backwards are split into input
    gradients (I) and weight gradients (W).

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. If a forward, an
    I and a W take equally long, the bubble on p devices is about half of the bubble of 1F1B, the
    work of p/2 micro-batches. A device saves the activations of 2 * ((p + 2) // 2) forwards of
    stages, half as many bytes as under 1F1B.
    """

    name: ClassVar[str] = "v_half"
    pattern: ClassVar[PlacementPattern] = ONE_WAVE
    divisor: ClassVar[int] = 2
    """Activations take about 1 / `divisor` of their memory under 1F1B. A forward advances by one
    device every 4 - `divisor` time slots on the way from rank 0 to p - 1, and in each slot on the
    way back.
    """

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each rank. The forwards F and input gradients I of one
        micro-batch, each on two stages per device, have a fixed pattern of time slots. The pattern
        starts again every six slots for the next micro-batch.

        Section 3 of the paper: the number of saved activations follows from the number of slots
        between a forward and its I. If `divisor` divides p, the first I starts later, so that the
        patterns of two micro-batches never use one slot of a device. A weight gradient W runs if
        the device would be idle, and before a forward that would exceed the memory.
        """
        p = len(rank_stages)
        down_slots = 4 - self.divisor
        slots = []
        forward_slots = (down_slots + 1) * p
        first_backward = forward_slots + (0 if p % self.divisor else down_slots + 1)
        for rank, (down, up) in enumerate(rank_stages):
            down_slot = down_slots * rank
            up_slot = forward_slots - down_slots - rank
            for slot, stage, phase in (
                (down_slot, down, Phase.FORWARD),
                (up_slot, up, Phase.FORWARD),
                (first_backward + down_slot + 1 - down_slots, up, Phase.INPUT_GRADIENT),
                (first_backward + up_slot, down, Phase.INPUT_GRADIENT),
            ):
                slots += [(slot + 6 * m, Task(stage, phase, m)) for m in range(micro_batches)]
        return insert_weight_gradients(
            orders_by_slot(rank_stages, slots),
            2 * p,
            2 * ((p + 2 * self.divisor - 2) // self.divisor),
        )


class VMin(VHalf):
    """Two stages per device in a V, with the minimum activation memory: micro-batches pass the
    devices as fast as possible, so their activations are needed for the shortest time. Backwards
    are split into input gradients (I) and weight gradients (W).

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. If a forward, an
    I and a W take equally long, the bubble on p devices is about two thirds of the bubble of 1F1B,
    the work of 2p/3 micro-batches. A device saves the activations of 2 * ((p + 4) // 3) forwards of
    stages, a third as many bytes as under 1F1B.
    """

    name: ClassVar[str] = "v_min"
    divisor: ClassVar[int] = 3


class DualPipe(Published):
    """Two pipelines that pass the same p devices in opposite directions. Each device alternates
    forwards of one direction with backwards of the other.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1. The bubble in the paper is
    (p/2 - 1)(F&B + B - 3W), where F&B is the time of a forward and a backward that overlap, B that
    of a backward and W that of its weight gradients. Here the forward and the backward do not
    overlap: the forward runs first. A device saves the activations of p + 1 micro-batches, and has
    the parameters of two stages.
    """

    name: ClassVar[str] = "dualpipe"
    pattern: ClassVar[PlacementPattern] = OPPOSITE

    def rank_stages(self, graph: StageGraph, micro_batches: int) -> RankStages:
        """Return the stages of each pipeline rank. Raises InfeasibleError if the number of
        micro-batches is odd or below 2p.
        """
        rank_stages = self.pattern.rank_stages(self.name, graph)
        if micro_batches % 2 or micro_batches < 2 * len(rank_stages):
            raise InfeasibleError(
                f"schedule {self.name} on {len(rank_stages)} {plural(len(rank_stages), 'device')} "
                "requires an even number of micro-batches, "
                f"{2 * len(rank_stages)} or more, but the step has {micro_batches}",
                hint="use schedule chimera, or raise --micro-batches",
            )
        return rank_stages

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each rank. Ranks at equal distance from the two ends of the
        pipelines have mirrored orders.
        """
        directions = range(0, micro_batches, 2), range(1, micro_batches, 2)
        half = len(rank_stages) // 2
        found = []
        for rank, stages in enumerate(rank_stages):
            distance = min(rank, len(rank_stages) - 1 - rank)
            direction = 1 if rank < half else -1
            notation = _dualpipe_notation(distance, half, micro_batches // 2)
            found.append(
                order_from_notation(notation, stages[::direction], directions[::direction])
            )
        return found


def _dualpipe_notation(distance: int, depth: int, micro_batches: int) -> Iterator[str]:
    """Yield the tasks of a pipeline rank in order, as words for `order_from_notation`. Each line
    below is one of the eight phases of DeepSeek-AI's figure 5.

    `distance` is the number of ranks between this rank and the nearer end of the pipeline, `depth`
    the number of stages of half the pipeline, and `micro_batches` the number of micro-batches per
    direction. Index 0 of a word is the direction that starts at the nearer end.
    """
    to_middle = depth - 1 - distance
    yield from ("F0",) * (2 * to_middle)
    yield from ("F0", "F1") * (distance + 1)
    yield from ("I1", "W", "F1") * to_middle
    yield from ("F0", "B1", "F1", "B0") * (micro_batches - 2 * depth + distance + 1)
    yield from ("B1", "F1", "B0") * to_middle
    yield from (
        ("B", "I")[index > distance] + "10"[index % 2] for index in range(2 * (distance + 1))
    )
    yield from ("W", "I0") * to_middle
    yield from ("W",) * (distance + 1)


class DualPipeV(Published):
    """DualPipe on half of the devices: instead of two pipelines of opposite directions, one
    pipeline with two stages per device visits the devices in ascending and then in descending
    order.

    DeepSeek-AI, DualPipe (2025), after Sea AI Lab's proposal to cut DualPipe in half. With 2p
    stages on p devices, the formulas of DualPipe for 2p devices hold. The bubble is
    (p - 1)(F&B + B - 3W), where F&B is the time of a forward and a backward that overlap, B that of
    a backward and W that of its weight gradients. A device saves the activations of 2p + 1 forwards
    of stages.
    """

    name: ClassVar[str] = "dualpipe_v"
    pattern: ClassVar[PlacementPattern] = ONE_WAVE

    def rank_stages(self, graph: StageGraph, micro_batches: int) -> RankStages:
        """Return the stages of each pipeline rank. Raises InfeasibleError if there are fewer than
        2p micro-batches.
        """
        rank_stages = self.pattern.rank_stages(self.name, graph)
        if micro_batches < 2 * len(rank_stages):
            raise InfeasibleError(
                f"schedule {self.name} on {len(rank_stages)} {plural(len(rank_stages), 'device')} "
                f"requires {2 * len(rank_stages)} micro-batches or more, but the step has "
                f"{micro_batches}",
                hint="use schedule zb_v, or raise --micro-batches",
            )
        return rank_stages

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each rank. Rank r has the order of a rank of DualPipe that
        is r ranks away from the nearer end of the pipelines.
        """
        every = range(micro_batches)
        return [
            order_from_notation(
                _dualpipe_notation(rank, len(rank_stages), micro_batches), stages, (every, every)
            )
            for rank, stages in enumerate(rank_stages)
        ]
