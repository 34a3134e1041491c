"""ZB-V: no bubble where F = I = W, in 1F1B's memory, with two stages a device.

ZB-H1: 1F1B with backwards in halves, in 1F1B's memory.

V-Half: half of 1F1B's memory.

V-Min: a third of 1F1B's memory.

ZB-H2: no bubble where F = I = W, for about twice 1F1B's memory.

V schedules made by repeating one micro-batch's pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.schedule import Phase, StageGraph, Task
from autopipe.passes.schedule.published.base import Lanes, Published, fill_weights, one_each, one_wave, spell


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


Pattern = tuple[int, int, int, int]
"""Slots of a micro-batch on one device: forward going down and coming up, input gradient going down and coming up."""

_PERIOD = 6
"""Slots between micro-batches: a device runs F, I and W of two stages for each."""


def repeat(lanes: Lanes, micro_batches: int, pattern: Callable[[int, int], Pattern], room: int) -> list[list[Task]]:
    """Lanes' orders for `pattern(place, devices)`, repeated every six slots and then moved together.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3: how long a pattern holds activations
    says how many are kept. Weight gradients stand where a device would wait, and where more than `room` activations
    would be kept.
    """
    orders = []
    for place, (down, up) in enumerate(lanes):
        tasks = ((down, Phase.FORWARD), (up, Phase.FORWARD), (up, Phase.INPUT_GRADIENT), (down, Phase.INPUT_GRADIENT))
        slots = [
            (slot + _PERIOD * each, Task(stage, phase, each))
            for slot, (stage, phase) in zip(pattern(place, len(lanes)), tasks, strict=True)
            for each in range(micro_batches)
        ]
        orders.append([task for _, task in sorted(slots, key=lambda each: each[0])])
    return fill_weights(orders, 2 * len(lanes), room)


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
        return repeat(lanes, micro_batches, _v_min_pattern, 2 * ((len(lanes) + 4) // 3))


def _v_min_pattern(place: int, devices: int) -> Pattern:
    """One slot a device, both ways; a gap keeps repetitions apart where a third of the devices is a whole number."""
    gap = 0 if devices % 3 else 2
    turn = 2 * devices + gap
    return place, 2 * devices - 1 - place, turn + place, turn + 2 * devices - 1 - place
