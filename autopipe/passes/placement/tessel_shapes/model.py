"""Input of the shapes: a problem's graph with its uses, its line of blocks and the seconds of each node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device
from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.problem import Problem, Work
from autopipe.passes.analysis.chain import Chain, make_chain
from autopipe.passes.analysis.operators import uses_of
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.sharding.regions import Network, weights_of

_MOST_BLOCKS = 768
"""Places to cut that are considered: time grows with their square."""


@dataclass(frozen=True, slots=True)
class CostedModel(Network):
    """The network of a problem.

    `seconds` are those of forward and backward of each whole node, on average over kinds of devices, `on_kind` those on
    each kind.
    """

    cluster: Cluster
    seconds: NDArray[np.float64]
    on_kind: dict[Device, NDArray[np.float64]]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.cluster.size

    @property
    def share(self) -> float:
        """Half a device's equal share of all: what has less is small."""
        return 0.5 / self.devices

    def weighs(self, nodes: Iterable[int]) -> float:
        """Seconds of nodes."""
        return float(self.seconds[list(nodes)].sum())


def costed_model(problem: Problem) -> CostedModel:
    """The model of a problem: one for all shapes, and for problems that differ in what costs nothing."""
    return _costed(problem.graph, problem.work, problem.cluster, problem.precision, problem.train)


@remembered(GRAPHS)
def _costed(graph: Graph, work: tuple[Work, ...], cluster: Cluster, precision: str, train: bool) -> CostedModel:
    on_kind = {}
    for device in cluster.kinds:
        forward, backward = node_seconds(work, device, precision)
        on_kind[device] = forward + (backward if train else 0.0)
    seconds = np.mean(list(on_kind.values()), axis=0)
    return CostedModel(graph, uses_of(graph), weights_of(graph), graph.consumers(), cluster, seconds, on_kind)


@remembered(GRAPHS)
def whole_line(model: CostedModel) -> Chain:
    """The nodes as a line of blocks."""
    return line_around(model, ())


def line_around(model: CostedModel, together: Iterable[Iterable[int]]) -> Chain:
    """The same with each of the sets of `together` in one block."""
    return make_chain(model.graph, model.seconds, _MOST_BLOCKS, tuple(map(tuple, together)))
