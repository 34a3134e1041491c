"""A time that no plan of the same placement's kind can beat."""

from __future__ import annotations

import numpy as np

from autopipe.ir.cluster import Device
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem, Work
from autopipe.passes.cost.assignment import stage_work
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs


def lower_bound_seconds(problem: Problem, placement: Placement) -> float:
    """Seconds of a step below which no schedule of `placement` can come: the largest of two bounds.

    A device must run all micro-batches of its stages, and the end of the step follows; and the work of all nodes,
    shared without loss by all devices, each at its own speed, takes as long however it is placed.
    """
    busy = np.zeros(problem.cluster.size)
    ends = np.zeros(problem.cluster.size)
    for stage, cost in zip(placement.stages, stage_costs(problem, placement), strict=True):
        devices = list(stage.devices)
        busy[devices] += problem.micro_batches * (cost.forward_s + cost.backward_s)
        if problem.train:
            ends[devices] = np.maximum(ends[devices], cost.update_s)
    nodes = {each.index for work in stage_work(problem, placement) for each in work.nodes}
    computed = [problem.work[index] for index in sorted(nodes)]
    alone = {device: _seconds_alone(problem, computed, device) for device in set(problem.cluster.devices)}
    if not all(alone.values()):
        return float((busy + ends).max())
    rate = sum(1.0 / alone[device] for device in problem.cluster.devices)
    return max(float((busy + ends).max()), problem.micro_batches / rate)


def _seconds_alone(problem: Problem, computed: list[Work], device: Device) -> float:
    """Seconds of one micro-batch's work on one device by itself."""
    forward, backward = node_seconds(computed, device, problem.precision)
    return float(forward.sum() + (backward.sum() if problem.train else 0.0))
