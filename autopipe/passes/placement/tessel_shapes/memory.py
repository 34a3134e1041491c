"""Chains cut anew where a device's memory does not hold its stages."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.placement import Placement
from autopipe.passes.cost.fit import device_memory, in_flight
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.tessel_shapes.model import CostedModel


def with_less_room(model: CostedModel, placement: Placement) -> CostedModel | None:
    """The model with less room for parameters on the devices that 1F1B would overfill; None where there is none.

    Of what the stages of such a device keep of their own, parameters give up the part by which memory is exceeded.
    """
    problem = model.problem
    if problem.train and problem.recompute == "auto":
        placement = Placement(tuple(replace(stage, recompute=True) for stage in placement.stages))
    costs = stage_costs(problem, placement)
    counts = in_flight(problem, placement)
    room = list(model.room)
    for device, used in enumerate(device_memory(problem, placement, costs)):
        excess = used - problem.memory_of(device)
        own = [index for index, stage in enumerate(placement.stages) if stage.devices == (device,)]
        held = sum(costs[index].memory_bytes(counts[index]) for index in own)
        if excess > 0 and held > excess:
            largest = max(costs[index].parameter_bytes for index in own)
            room[device] = min(room[device], largest * (1 - excess / held))
    return replace(model, room=tuple(room)) if tuple(room) != model.room else None
