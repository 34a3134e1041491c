"""Chains cut anew where a device's memory does not hold its stages."""

from __future__ import annotations

import math
from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory_check import device_memory, in_flight, least_memory
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.tessel_shapes.outline import Outline, with_chains_cut

_ATTEMPTS = 8


def with_chains_that_fit(problem: Problem, outline: Outline) -> Placement:
    """The stages of an outline, with chains cut anew as long as memory does not hold them.

    Of those found, the one that exceeds memory least under any schedule, then under 1F1B. Raises InfeasibleError where
    a chain has too few operators.
    """
    room = (math.inf,) * problem.cluster.size
    placement = with_chains_cut(problem, outline, room)
    found = []
    for _ in range(_ATTEMPTS):
        weighed = _recomputed(problem, placement)
        least, usual = _excess(problem, weighed)
        found.append(((_most(least), _most(usual)), placement))
        lighter = _less_room(problem, weighed, room, least if _most(least) else usual)
        if lighter == room:
            break
        try:
            room, placement = lighter, with_chains_cut(problem, outline, lighter)
        except InfeasibleError:
            break
    return min(found, key=lambda each: each[0])[1]


def _excess(problem: Problem, placement: Placement) -> tuple[list[int], list[int]]:
    """Bytes by which each device's need exceeds its memory, under any schedule and under 1F1B; below 0 if it fits."""
    costs = stage_costs(problem, placement)
    limits = [problem.memory_of(device) for device in range(problem.cluster.size)]
    needs = least_memory(problem, placement, costs), device_memory(problem, placement, costs)
    least, usual = ([need - limit for need, limit in zip(each, limits, strict=True)] for each in needs)
    return least, usual


def _recomputed(problem: Problem, placement: Placement) -> Placement:
    """The placement as it is where memory is scarce."""
    if not problem.train or problem.recompute != "auto":
        return placement
    return Placement(tuple(replace(stage, recompute=True) for stage in placement.stages))


def _most(excess: list[int]) -> int:
    return max(0, *excess)


def _less_room(problem: Problem, placement: Placement, room: tuple[float, ...], excess: list[int]) -> tuple[float, ...]:
    """Less room on devices that are too full.

    Of what such a device's own stages hold, their parameters give up the part by which memory is exceeded.
    """
    if not _most(excess):
        return room
    costs, counts = stage_costs(problem, placement), in_flight(problem, placement)
    found = list(room)
    for device, over in enumerate(excess):
        own = [index for index, stage in enumerate(placement.stages) if stage.devices == (device,)]
        held = sum(costs[index].memory_bytes(counts[index]) for index in own)
        if held > over > 0:
            largest = max(costs[index].parameter_bytes for index in own)
            found[device] = min(found[device], largest * (1 - over / held))
    return tuple(found)
