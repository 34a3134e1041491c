"""Cost a step, and memory, of holding a parameter in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxis
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import accumulate_per_byte, update_line
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.spmd.search.moves import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """A parameter on one device of a group, for each of several layouts."""

    gradient_s: Floats
    """Seconds, once a step, to exchange gradients among the devices with the same block."""
    update_s: Floats
    """Seconds a step to add micro-batches' gradients to one another and to update."""
    bytes: NDArray[np.int64]
    """Parameter, gradient and optimizer's state."""


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """Costs of a problem's parameters on a group of devices."""

    problem: Problem
    devices: tuple[int, ...]
    _rates: dict[frozenset[MeshAxis], float] = field(default_factory=dict)

    def holding(self, name: str, layouts: Sequence[Layout]) -> Holding:
        """Cost of parameter `name` in each of `layouts`.

        Gradients go at the bandwidth of their group: many parameters share one exchange, and its latency is no one's.
        """
        parts = [layout.parts for layout in layouts]
        devices = len(self.devices)
        by_parts = {count: state_of(self.problem, ((name, count),), {name: devices // count}) for count in set(parts)}
        states = [by_parts[count] for count in parts]
        gradients = np.array([state.gradient_bytes for state in states], dtype=float)
        updated = np.array([state.updated_bytes for state in states], dtype=float)
        added, update = _per_byte(self.problem, self.devices)
        return Holding(
            gradient_s=gradients * np.array([self._rate(layout) for layout in layouts]),
            update_s=gradients * added + updated * update,
            bytes=np.array([state.total for state in states], dtype=np.int64),
        )

    def _rate(self, layout: Layout) -> float:
        """Seconds a byte of gradients over the devices that hold the first one's block."""
        cutting = frozenset(axis for axes in layout.cuts for axis in axes)
        if cutting not in self._rates:
            places = np.arange(len(self.devices))
            alike = np.ones(len(places), dtype=bool)
            for axis in cutting:
                alike &= places // axis.stride % axis.degree == 0
            group = [self.devices[place] for place in np.flatnonzero(alike).tolist()]
            ways = exchange_of_gradients(self.problem, group).ways
            self._rates[cutting] = min(way.per_byte_s for way in ways)
        return self._rates[cutting]


def _per_byte(problem: Problem, devices: tuple[int, ...]) -> tuple[float, float]:
    """Seconds a step of adding up a byte of gradients and of an update by it, on the slowest device, but for the
    update's one launch."""
    kinds = {problem.cluster.devices[device] for device in devices}
    added = max(accumulate_per_byte(device) for device in kinds) * (problem.micro_batches - 1)
    states = problem.optimizer.states
    return added, max(update_line(device, states).per_byte_s for device in kinds)
