"""Chains cut anew where a device's memory does not hold its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.passes.cost.fit import device_memory, in_flight, least_memory
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.tessel_shapes.model import CostedModel

_ATTEMPTS = 8


def with_chains_that_fit(model: CostedModel, placed: Callable[[CostedModel], Placement]) -> Placement:
    """What `placed` makes of the model, with chains cut anew as long as memory does not hold them.

    Of those found, the one that exceeds memory least under any schedule, then under 1F1B.
    """
    placement = placed(model)
    found = []
    for _ in range(_ATTEMPTS):
        least, usual = _excess(model, placement)
        found.append(((_most(least), _most(usual)), placement))
        lighter = _with_less_room(model, placement, least if _most(least) else usual)
        if lighter.room == model.room:
            break
        try:
            model, placement = lighter, placed(lighter)
        except InfeasibleError:
            break
    return min(found, key=lambda each: each[0])[1]


def _excess(model: CostedModel, placement: Placement) -> tuple[list[int], list[int]]:
    """Bytes by which each device's need exceeds its memory, under any schedule and under 1F1B; below 0 if it fits."""
    problem = model.problem
    costs = stage_costs(problem, _recomputed(model, placement))
    limits = [problem.memory_of(device) for device in range(model.devices)]
    needs = least_memory(problem, placement, costs), device_memory(problem, placement, costs)
    least, usual = ([need - limit for need, limit in zip(each, limits, strict=True)] for each in needs)
    return least, usual


def _recomputed(model: CostedModel, placement: Placement) -> Placement:
    """The placement as it is where memory is scarce."""
    if not model.problem.train or model.problem.recompute != "auto":
        return placement
    return Placement(tuple(replace(stage, recompute=True) for stage in placement.stages))


def _most(excess: list[int]) -> int:
    return max(0, *excess)


def _with_less_room(model: CostedModel, placement: Placement, excess: list[int]) -> CostedModel:
    """The model with less room on devices that are too full.

    Of what such a device's own stages hold, their parameters give up the part by which memory is exceeded.
    """
    placement = _recomputed(model, placement)
    costs, counts = stage_costs(model.problem, placement), in_flight(model.problem, placement)
    room = list(model.room)
    for device, over in enumerate(excess):
        own = [index for index, stage in enumerate(placement.stages) if stage.devices == (device,)]
        held = sum(costs[index].memory_bytes(counts[index]) for index in own)
        if held > over > 0:
            largest = max(costs[index].parameter_bytes for index in own)
            room[device] = min(room[device], largest * (1 - over / held))
    return replace(model, room=tuple(room))
