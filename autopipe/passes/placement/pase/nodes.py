"""What each configuration of a node costs by itself: computing, telling statistics, holding its own parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.problem import Problem
from autopipe.passes.cost.assignment import Assigned, Sharing
from autopipe.passes.cost.exchange import statistics_seconds
from autopipe.passes.cost.kept import Kept
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.uses import Use
from autopipe.passes.placement.pase.configurations import Splits
from autopipe.passes.placement.pase.moves import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """Seconds of the nodes of a problem on the slowest device of a group, by the share that it computes."""

    problem: Problem
    devices: tuple[int, ...]
    _by_degree: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _told: dict[Any, tuple[float, float]] = field(default_factory=dict)

    def seconds(self, node: int, use: Use, configurations: Sequence[Splits]) -> tuple[Floats, Floats]:
        """One micro-batch's forward and backward of a node in each configuration, statistics included."""
        found = np.array([self._computed(node, splits) for splits in configurations])
        if any(axis.kind.is_joint for axis in use.space.axes):
            found += np.array([self._statistics(node, use, splits) for splits in configurations])
        return found[:, 0], found[:, 1]

    def _computed(self, node: int, splits: Splits) -> tuple[float, float]:
        degree = math.prod(split.degree for split in splits)
        if degree not in self._by_degree:
            kinds = {self.problem.cluster.devices[device] for device in self.devices}
            work, precision = self.problem.work, self.problem.precision
            each = [node_seconds(work, device, precision, 1.0 / degree) for device in kinds]
            forward, backward = (np.maximum.reduce(found) for found in zip(*each, strict=True))
            self._by_degree[degree] = forward, backward
        forward, backward = self._by_degree[degree]
        return float(forward[node]), float(backward[node])

    def _statistics(self, node: int, use: Use, splits: Splits) -> tuple[float, float]:
        key = id(use), splits
        if key not in self._told:
            graph = self.problem.graph
            sharing = Sharing({split.axis: split.degree for split in splits}, 1.0, (), ())
            assigned = Assigned(node, graph.nodes[node], use, sharing)
            told = statistics_seconds(graph, self.problem.cluster, self.devices, assigned)
            self._told[key] = told.forward_s, told.backward_s
        return self._told[key]


def kept_bytes(kept: Sequence[Kept], configurations: Sequence[Splits]) -> NDArray[np.int64]:
    """Bytes on one device that backward keeps of a micro-batch, for each configuration of the node that keeps them."""
    degrees: list[Mapping[str, int]] = [{split.axis: split.degree for split in splits} for splits in configurations]
    return np.array([sum(each.local_bytes(dict(own)) for each in kept) for own in degrees], dtype=np.int64)
