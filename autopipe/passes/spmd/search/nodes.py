"""Cost of each configuration of a node by itself: computing, exchanging statistics, holding its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import no_statistics
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.gradients import SavedTensor
from autopipe.passes.analysis.operators import OpInstance
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import statistics_seconds
from autopipe.passes.spmd.search.configurations import Splits
from autopipe.passes.spmd.search.lying import MeshPositions
from autopipe.passes.spmd.search.moves import Floats
from autopipe.passes.spmd.search.numbering import Integers, distinct


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """Seconds of the nodes of a problem on the slowest device of a group, by the share that it computes."""

    problem: Problem
    devices: tuple[int, ...]
    _by_degree: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _told: dict[tuple[int, int], tuple[Sequence[Splits], Floats]] = field(default_factory=dict)
    """By use and configurations, which are held so that their place stays their own."""

    def seconds(
        self, node: int, use: OpInstance, configurations: Sequence[Splits], lying: MeshPositions
    ) -> tuple[Floats, Floats]:
        """One micro-batch's forward and backward of a node in each configuration, statistics included."""
        degrees, of = distinct(lying.degree)
        found = np.array([self._computed(node, degree) for degree in degrees.tolist()])[of]
        if use.row.statistics is not no_statistics and any(axis.kind.is_joint for axis in use.space.axes):
            found += self._statistics(node, use, configurations)
        return found[:, 0], found[:, 1]

    def _computed(self, node: int, degree: int) -> tuple[float, float]:
        """Forward and backward of one of `degree` equal shares."""
        if degree not in self._by_degree:
            kinds = {self.problem.cluster.devices[device] for device in self.devices}
            work, precision = self.problem.work, self.problem.precision
            each = [node_seconds(work, device, precision, 1.0 / degree) for device in kinds]
            forward, backward = (np.maximum.reduce(found) for found in zip(*each, strict=True))
            self._by_degree[degree] = forward, backward
        forward, backward = self._by_degree[degree]
        return float(forward[node]), float(backward[node])

    def _statistics(self, node: int, use: OpInstance, configurations: Sequence[Splits]) -> Floats:
        """Forward and backward of what the devices tell one another in each configuration."""
        key = id(use), id(configurations)
        if key not in self._told:
            joint = {axis.name for axis in use.space.axes if axis.kind.is_joint}
            signature = signature_of(self.problem.graph, self.problem.graph.nodes[node])
            found = np.zeros((len(configurations), 2))
            for row, splits in enumerate(configurations):
                if any(split.axis in joint for split in splits):
                    degrees = {split.axis: split.degree for split in splits}
                    told = statistics_seconds(self.problem.cluster, self.devices, use, signature, degrees)
                    found[row] = told.forward_s, told.backward_s
            self._told[key] = configurations, found
        return self._told[key][1]


def kept_bytes(kept: Sequence[SavedTensor], lying: MeshPositions) -> Integers:
    """Bytes on one device that backward keeps of a micro-batch, for each configuration of the node that keeps them.

    `SavedTensor.local_bytes` for all of them at once.
    """
    found = np.zeros(lying.configurations, dtype=np.int64)
    for each in kept:
        size = each.bytes // lying.degrees(axis for dimension in each.dimensions for axis in dimension)
        for window, extent in each.windows:
            degree = lying.degrees([window.axis])
            spans = np.array([window.span(window.count // parts) for parts in degree.tolist()], dtype=np.int64)
            size = np.where(degree > 1, size * spans // extent, size)
        found += size
    return found
