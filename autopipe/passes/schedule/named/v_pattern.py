"""V schedules made by repeating one micro-batch's pattern."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.schedule import Phase, Task
from autopipe.passes.schedule.named.lanes import Lanes
from autopipe.passes.schedule.named.weights import fill_weights

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
