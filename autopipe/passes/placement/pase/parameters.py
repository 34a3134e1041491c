"""What holding a parameter in a layout costs a step, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout
from autopipe.ir.problem import Problem
from autopipe.passes.cost.communication import all_reduce
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import accumulate_seconds, update_seconds
from autopipe.passes.placement.pase.moves import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """A parameter on one device of a group, for each of several layouts."""

    gradient_s: Floats
    """Seconds, once a step, to add up gradients over the devices with the same block."""
    update_s: Floats
    """Seconds a step to add micro-batches' gradients to one another and to update."""
    bytes: NDArray[np.int64]
    """Parameter, gradient and optimizer's state."""


def holding(problem: Problem, devices: tuple[int, ...], name: str, layouts: Sequence[Layout]) -> Holding:
    """What parameter `name` costs on `devices` in each of `layouts`.

    Gradients go at the bandwidth of their group: many parameters share one exchange, so its latency is none of theirs.
    """
    states = [state_of(problem, ((name, layout.parts),)) for layout in layouts]
    gradients = np.array([state.gradient_bytes for state in states], dtype=float)
    per_byte = np.array([_per_byte(problem, devices, layout) for layout in layouts])
    return Holding(
        gradient_s=gradients * per_byte,
        update_s=gradients * _update_per_byte(problem, devices),
        bytes=np.array([state.total for state in states], dtype=np.int64),
    )


def _per_byte(problem: Problem, devices: tuple[int, ...], layout: Layout) -> float:
    """Seconds a byte of gradients over the devices that hold the first one's block."""
    first = layout.box(0)
    group = [device for place, device in enumerate(devices) if layout.box(place) == first]
    return min(way.per_byte_s for way in all_reduce(problem.cluster, group).ways)


def _update_per_byte(problem: Problem, devices: tuple[int, ...]) -> float:
    """Seconds a step and a byte of gradients, on the slowest device, but for the update's one launch."""
    kinds = {problem.cluster.devices[device] for device in devices}
    added = max(accumulate_seconds(device, 1.0) for device in kinds) * (problem.micro_batches - 1)
    states = problem.optimizer.states
    return added + max(update_seconds(device, 1.0, states) - device.launch_latency_s for device in kinds)
