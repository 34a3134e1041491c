"""Cost of adding up partial sums: collectives one after the other, for tensors of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster
from autopipe.ir.layout import MeshAxes
from autopipe.passes.cost.communication import FREE, Cost, reduction_cost

Addition = tuple[tuple[str, MeshAxes, int], ...]
"""The collectives that add up shares: kind, over which axes, and into how many parts the tensor is cut before."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SumReduction:
    """Cost of several reductions: step after step, each the cheapest of its ways."""

    parts: _Floats
    """[steps, additions] into how many the tensor is cut before."""
    fixed_s: _Floats
    """[steps, additions, ways]"""
    per_byte_s: _Floats
    """[steps, additions, ways]"""

    def seconds(self, size_bytes: float) -> _Floats:
        """For a tensor of `size_bytes` in all."""
        found: _Floats = np.zeros(self.parts.shape[1])
        if size_bytes > 0:
            for parts, fixed, per_byte in zip(self.parts, self.fixed_s, self.per_byte_s, strict=True):
                found += (fixed + per_byte * (size_bytes / parts)[:, None]).min(axis=1)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Collectives:
    """Costs of collectives along the axes of the mesh of `devices`, worked out once each."""

    cluster: Cluster
    devices: tuple[int, ...]
    _known: dict[tuple[str, MeshAxes], Cost] = field(default_factory=dict)

    def adding(self, additions: Sequence[Addition]) -> SumReduction:
        """Cost of each of `additions`."""
        steps = max(map(len, additions))
        keys = dict.fromkeys((kind, over) for each in additions for kind, over, _ in each)
        costs = [FREE, *map(self._cost, keys)]
        numbers = {key: number for number, key in enumerate(keys, 1)}
        which = np.zeros((steps, len(additions)), dtype=np.int64)
        parts = np.ones(which.shape)
        for column, each in enumerate(additions):
            for row, (kind, over, count) in enumerate(each):
                which[row, column], parts[row, column] = numbers[kind, over], count
        figures = np.zeros((2, len(costs), max(len(cost.ways) for cost in costs)))
        figures[0] = np.inf
        for number, cost in enumerate(costs):
            for place, way in enumerate(cost.ways):
                figures[:, number, place] = way.fixed_s, way.per_byte_s
        return SumReduction(parts, figures[0][which], figures[1][which])

    def _cost(self, key: tuple[str, MeshAxes]) -> Cost:
        if key not in self._known:
            self._known[key] = reduction_cost(self.cluster, self.devices, *key)
        return self._known[key]
