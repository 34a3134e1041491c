"""What the shapes are read from: the problem's graph with its uses, its line of blocks and the seconds of each node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device
from autopipe.ir.problem import Problem
from autopipe.passes.cost.chain import Chain, make_chain
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.uses import uses_of
from autopipe.passes.spmd.network import Network, weights_of

_MOST_BLOCKS = 768
"""Places to cut that are considered: time grows with their square."""


@dataclass(frozen=True, slots=True)
class CostedModel(Network):
    """The network of a problem.

    `seconds` are those of forward and backward of each whole node, on average over kinds of devices, `on_kind` those on
    each kind. `room` is how many bytes of parameters a stage of a chain may have on each device.
    """

    problem: Problem
    seconds: NDArray[np.float64]
    on_kind: dict[Device, NDArray[np.float64]]
    room: tuple[float, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.problem.cluster.size

    @property
    def share(self) -> float:
        """Half a device's equal share of all: what has less is small."""
        return 0.5 / self.devices

    def weighs(self, nodes: Iterable[int]) -> float:
        """Seconds of nodes."""
        return float(self.seconds[list(nodes)].sum())

    def line(self, together: Iterable[Iterable[int]] = ()) -> Chain:
        """The nodes as a line of blocks, each of the sets of `together` in one."""
        return make_chain(self.graph, self.seconds, _MOST_BLOCKS, tuple(map(tuple, together)))


def costed_model(problem: Problem) -> CostedModel:
    """The model of a problem."""
    graph = problem.graph
    on_kind = {}
    for device in problem.cluster.kinds:
        forward, backward = node_seconds(problem.work, device, problem.precision)
        on_kind[device] = forward + (backward if problem.train else 0.0)
    seconds = np.mean(list(on_kind.values()), axis=0)
    room = (np.inf,) * problem.cluster.size
    return CostedModel(graph, uses_of(graph), weights_of(graph), graph.consumers(), problem, seconds, on_kind, room)
