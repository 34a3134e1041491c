"""What each configuration of a node costs by itself: computing, telling statistics, holding its own parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.ops import signature_of
from autopipe.ir.ops.row import no_statistics
from autopipe.ir.problem import Problem
from autopipe.passes.cost.exchange import statistics_seconds
from autopipe.passes.cost.kept import Kept
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.uses import Use
from autopipe.passes.spmd.search.configurations import Splits
from autopipe.passes.spmd.search.moves import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """Seconds of the nodes of a problem on the slowest device of a group, by the share that it computes."""

    problem: Problem
    devices: tuple[int, ...]
    _by_degree: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _told: dict[tuple[int, int], tuple[Sequence[Splits], Floats]] = field(default_factory=dict)
    """By use and configurations, which are held so that their place stays their own."""

    def seconds(self, node: int, use: Use, configurations: Sequence[Splits]) -> tuple[Floats, Floats]:
        """One micro-batch's forward and backward of a node in each configuration, statistics included."""
        degrees = [math.prod([split.degree for split in splits]) for splits in configurations]
        by_degree = {degree: self._computed(node, degree) for degree in set(degrees)}
        found = np.array([by_degree[degree] for degree in degrees])
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

    def _statistics(self, node: int, use: Use, configurations: Sequence[Splits]) -> Floats:
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


def kept_bytes(kept: Sequence[Kept], configurations: Sequence[Splits]) -> NDArray[np.int64]:
    """Bytes on one device that backward keeps of a micro-batch, for each configuration of the node that keeps them."""
    degrees: list[Mapping[str, int]] = [{split.axis: split.degree for split in splits} for splits in configurations]
    return np.array([sum(each.local_bytes(dict(own)) for each in kept) for own in degrees], dtype=np.int64)
