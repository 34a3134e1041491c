"""Signature of a device group: all that decides how fast it computes and exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from autopipe.ir.cluster import Cluster


def reach(cluster: Cluster, devices: Sequence[int]) -> Hashable:
    """The devices' kinds, their order, and the levels that part neighbours: any two part at the outermost between."""
    ranked = sorted(devices)
    place = {device: index for index, device in enumerate(ranked)}
    levels = tuple(cluster.level(first, second) for first, second in itertools.pairwise(ranked))
    return tuple(cluster.devices[device] for device in devices), tuple(place[device] for device in devices), levels
